"""How long a search takes in a store of many prompts: ``python -m tests.bench.store_search``.

The entries are made without a model: files that hold nothing but tokens and
a header, a fifth of them turns of conversations, all behind one of a few system
prompts. Prints a table for 1,000 and 100,000 entries (or the numbers given).
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import vkv
from vkv import container, header
from vkv.store import rows
from vkv.store.describe import Description
from vkv.store.tree import WIDTH

TOKENS = 4096
SEARCHES = 500
MODEL = bytes(32)


def prompts(count: int, chance: random.Random) -> list[bytes]:
    """Token bytes of prompts: a shared beginning of 0 to 1,000 tokens, then their own."""
    systems = [chance.randbytes(WIDTH * n) for n in (0, 50, 300, 1000)]
    made: list[bytes] = []
    for n in range(count):
        if n % 5 == 4:  # the next turn of an earlier conversation
            old = made[chance.randrange(len(made))]
            cut = WIDTH * chance.randrange(100, TOKENS)
            made.append(old[:cut] + chance.randbytes(WIDTH * TOKENS - cut))
        else:
            system = chance.choice(systems)
            made.append(system + chance.randbytes(WIDTH * TOKENS - len(system)))
    return made


def write(store: vkv.PromptStore, db: object, key: str, tokens: bytes) -> Description:
    """A file with the tokens alone where the index says that they are."""
    path = store._layout.path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tokens)
    return Description(
        key=key, size=len(tokens), model=MODEL, label="none", codec="raw",
        needs=f"raw@1 vkv@{header.MAJOR}", trims=True, tokens=tokens,
        digest=container.digest(tokens), tokens_at=0, bases=(), content=bytes.fromhex(key),
    )  # fmt: skip


def fill(store: vkv.PromptStore, made: list[bytes]) -> float:
    """Enter the prompts; seconds for each."""
    start = time.perf_counter()
    with store._index.write() as db:
        for tokens in made:
            key = container.digest(tokens).hex()
            rows.add(db, store._layout, write(store, db, key, tokens), time.time())
    return (time.perf_counter() - start) / len(made)


def search(store: vkv.PromptStore, made: list[bytes], chance: random.Random) -> list[float]:
    """Milliseconds of each of many searches for prompts that leave a stored one somewhere."""
    times = []
    for _ in range(SEARCHES):
        tokens = chance.choice(made)
        cut = chance.randrange(1, TOKENS)
        asked = tokens[: WIDTH * cut] + chance.randbytes(WIDTH * 100)
        ids = memoryview(asked).cast("I").tolist()
        start = time.perf_counter()
        found = store.find(ids, model=MODEL)
        times.append(1e3 * (time.perf_counter() - start))
        assert found is not None
        assert found.tokens >= cut
    return sorted(times)


def main() -> None:
    counts = [int(n) for n in sys.argv[1:]] or [1_000, 100_000]
    print("entries  nodes    index      add       median    90 %      worst")
    for count in counts:
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            chance = random.Random(count)
            made = prompts(count, chance)
            store = vkv.PromptStore(Path(folder) / "store")
            added = fill(store, made)
            search(store, made[:10], chance)
            times = search(store, made, chance)
            with store._index.read() as db:
                nodes = db.execute("SELECT count(*) FROM nodes").fetchone()[0]
            size = sum(p.stat().st_size for p in store.root.glob("index*"))
            print(
                f"{count:<8,} {nodes:<8,} {size / 1e6:6.1f} MB  {1e3 * added:5.2f} ms  "
                f"{statistics.median(times):5.2f} ms  {times[len(times) * 9 // 10]:5.2f} ms  "
                f"{times[-1]:5.2f} ms"
            )


if __name__ == "__main__":
    main()
