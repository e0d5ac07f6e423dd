"""How long a search takes in a store of many prompts: ``python -m benchmarks.store_search``.

The entries are made without a model: files that hold nothing but tokens and
a header, a fifth of them turns of conversations, all behind one of a few system
prompts. Prints a table for 1,000 and 100,000 entries (or the numbers given): the first
search for each of 500 prompts, which reads its file from the disk, then the second.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import vkv
from vkv.format import container_write, header
from vkv.store.local import listing
from vkv.store.local.prefix_tree import WIDTH
from vkv.store.local.summary import Description

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
            cut = WIDTH * chance.randrange(TOKENS // 2, TOKENS)
            made.append(old[:cut] + chance.randbytes(WIDTH * TOKENS - cut))
        else:
            system = chance.choice(systems)
            made.append(system + chance.randbytes(WIDTH * TOKENS - len(system)))
    return made


def write(store: vkv.PromptStore, key: str, tokens: bytes) -> Description:
    """A file with the tokens alone where the index says that they are."""
    path = store._layout.path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tokens)
    return Description(
        key=key, size=len(tokens), model=MODEL, label="none", codec="raw",
        name="", tags=(), needs=f"raw@1 vkv@{header.MAJOR}", trims=True, tokens=tokens,
        digest=container_write.digest(tokens), tokens_at=0, dependencies=(),
        content=bytes.fromhex(key),
    )  # fmt: skip


def fill(store: vkv.PromptStore, made: list[bytes]) -> float:
    """Enter the prompts; seconds for each."""
    start = time.perf_counter()
    with store._index.write() as db:
        for tokens in made:
            key = container_write.digest(tokens).hex()
            listing.add(db, store._layout, write(store, key, tokens), time.time(), [])
    return (time.perf_counter() - start) / len(made)


def questions(made: list[bytes], chance: random.Random) -> list[tuple[list[int], int]]:
    """Prompts that leave a stored one somewhere, and what they share with it at least."""
    asked = []
    for tokens in chance.sample(made, min(SEARCHES, len(made))):
        cut = chance.randrange(1, TOKENS)
        whole = tokens[: WIDTH * cut] + chance.randbytes(WIDTH * (TOKENS - cut))
        asked.append((memoryview(whole).cast("I").tolist(), cut))
    return asked


def search(store: vkv.PromptStore, asked: list[tuple[list[int], int]]) -> list[float]:
    """Milliseconds of each search, sorted."""
    times = []
    for ids, cut in asked:
        start = time.perf_counter()
        found = store.find(ids, model=MODEL)
        times.append(1e3 * (time.perf_counter() - start))
        assert found is not None
        assert found.tokens >= cut
    return sorted(times)


def main() -> None:
    counts = [int(n) for n in sys.argv[1:]] or [1_000, 100_000]
    print("entries  nodes    index     add      first: median 90 %   then: median 90 %   worst")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            chance = random.Random(count)
            made = prompts(count, chance)
            store = vkv.PromptStore(Path(folder) / "store")
            added = fill(store, made)
            asked = questions(made, chance)
            first, then = search(store, asked), search(store, asked)
            with store._index.read() as db:
                nodes = db.execute("SELECT count(*) FROM nodes").fetchone()[0]
            store._index.close()  # moves what is in its log to its place
            size = store._layout.index.stat().st_size
            print(
                f"{count:<8,} {nodes:<8,} {size / 1e6:5.1f} MB  {1e3 * added:.2f} ms  "
                f"{statistics.median(first):10.2f} {first[len(first) * 9 // 10]:7.2f}  "
                f"{statistics.median(then):10.2f} {then[len(then) * 9 // 10]:7.2f} {then[-1]:7.2f}"
            )


if __name__ == "__main__":
    main()
