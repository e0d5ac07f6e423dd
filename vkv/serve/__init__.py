"""mlx_lm.server over a store: prompts that were read once are found again after a restart.

::

    server = Server(upstream.arguments(model="SmolLM2-135M-Instruct"), Disk(...))
    server.start()      # HTTP as mlx_lm.server has it
    server.close()      # what waits to be written is written

The HTTP API, batching and sampling are mlx_lm.server's own; ``upstream`` has all that
is used of it. Its in-memory prompt cache is ``StoredPrompts`` here, which looks on
disk for what memory lacks, and hands finished prompts to a ``Writer``.
"""

from vkv.serve.disk import Disk
from vkv.serve.server import Server

__all__ = ["Disk", "Server"]
