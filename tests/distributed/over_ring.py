"""One rank of ``test_ranks.py``: prints what it saw as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from fixtures.models.tiny import MODELS
from vkv.distributed import ranks as transport
from vkv.distributed.model import of_sharded
from vkv.distributed.ranks import Ranks
from vkv.errors import DigestError, VkvError

group = mx.distributed.init(strict=True, backend="ring")
ranks = Ranks(group, timeout=60)
found: dict[str, Any] = {}


def damaged():
    if ranks.rank == 1:
        raise DigestError("the bytes changed", rule="D1", at="layers.0.keys")


def refused(work):
    try:
        ranks.agree(work)
    except (VkvError, OSError) as exc:
        return [type(exc).__name__, str(exc)]
    return None


found["damaged"] = refused(damaged)
found["missing"] = refused(lambda: Path("/no/such/file").read_bytes() if ranks.rank == 0 else None)
found["after"] = ranks.agree(lambda: ranks.rank)
transport.CHUNK = 7
found["gathered"] = [len(x) for x in ranks.gather(bytes([ranks.rank]) * (20 * ranks.rank))]
transport.CHUNK = 1 << 24
whole: Any = MODELS["llama"]()
whole.shard(group)
found["tensor"] = of_sharded(ranks, whole)[0].id.hex()
staged: Any = MODELS["deepseek_v3"]()
staged.model.pipeline(group)
found["pipeline"] = of_sharded(ranks, staged)[0].id.hex()
odd: Any = MODELS["llama"]()
odd.model.layers[0].mlp.up_proj.weight += ranks.rank
found["unknown"] = None
try:
    of_sharded(ranks, odd)
except VkvError as exc:
    found["unknown"] = str(exc)
print(json.dumps(found), flush=True)
