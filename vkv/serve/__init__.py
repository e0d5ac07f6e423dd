"""Run mlx_lm.server over a store, so that prompts computed once survive a restart.

::

    server = Server(upstream.arguments(model="SmolLM2-135M-Instruct"), Disk(...))
    server.start()      # serve HTTP as mlx_lm.server does
    server.close()      # write the prompts that wait, then end

The HTTP API, batching and sampling are mlx_lm.server's own; ``upstream`` lists every
name of it that is used. ``StoredPrompts`` replaces its in-memory prompt cache: it looks
on disk for prompts that memory lacks, and passes finished prompts to a ``Writer``.
"""

from vkv.serve.disk import Disk
from vkv.serve.server import Server

__all__ = ["Disk", "Server"]
