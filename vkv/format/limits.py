"""Hold the limits of headers, each with its reason.

Limits of the JSON table stand in ``vkv.format.container``, beside what they bound.
"""

from __future__ import annotations

#: 6,000 stored tensors fit. Decoded, the smallest things of which a field may have any number
#: (frequencies) take 49 times their bytes.
MAX_HEADER = 1 << 20
ALIGN = 64
#: Key ``pad`` and the head of its bytes.
PAD_OVERHEAD = 6
#: CacheList inside CacheList; the deepest model known nests once.
MAX_DEPTH = 4
#: Entries of a list or map that models make longer: layers, segments and what there is one of for
#: each; entries of the others; and frequencies of a rope.
MANY, FEW, MAX_FREQS = 4096, 64, 1 << 15
#: More than any model takes; as a list they are nine times their bytes.
MAX_TOKENS = 1 << 22
#: What a rope's numbers are between. The largest base known is 1e11.
ROPE_RANGE = (1e-12, 1e12)
#: Other files that one may stand on; each is held open while it is read.
MAX_FILES = 64
#: Elements a stored byte may stand for: 0.125 bits an element is below any useful
#: rate, and a hostile shape cannot make a small file ask for much memory (H10).
MAX_EXPANSION = 64
#: Dtypes that codecs other than ``raw`` encode and decode to, and the largest value of the first.
FLOATS, F16_MAX = ("F16", "BF16", "F32"), 65504.0
#: Bits of a code and channels of a group that ``mx.quantize`` takes.
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
