"""``vkv bench``: rate, quality and speed of any codec on any model.

One raw prompt cache is the zero; every codec encodes, writes and loads that
same cache in the same process, and the model then reads the same tokens after it.
"""

from vkv.bench.report import Results
from vkv.bench.run import Bench, default_codecs, with_basis

__all__ = ["Bench", "Results", "default_codecs", "with_basis"]
