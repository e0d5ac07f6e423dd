"""How long a search takes in a store of many prompts: ``python -m benchmarks.store_search``.

The entries are made without a model: files that hold nothing but tokens and
a header, a fifth of them turns of conversations, all behind one of a few system
prompts. Prints a table for 1,000 and 100,000 entries (or the numbers given): the first
search for each of 500 prompts, which reads its file from the disk, then the second.

``python -m benchmarks.store_search --points N 10000`` compares, in one process, entries that
serve whole only with the same ones with N checkpoints each, by the median of CPU times.
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


def write(
    store: vkv.PromptStore, key: str, tokens: bytes, points: int | None = None
) -> Description:
    """A file with the tokens alone where the index says that they are.

    With ``points`` its caches cannot be trimmed, and have so many checkpoints.
    """
    places = range(TOKENS // 8, TOKENS, TOKENS // 8)
    path = store._layout.path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tokens)
    return Description(
        key=key, size=len(tokens), model=MODEL, label="none", codec="raw",
        name="", tags=(), needs=f"{'+checkpoints ' * bool(points)}raw@1 vkv@{header.MAJOR}",
        trims=points is None, tokens=tokens, checkpoints=tuple(places)[: points or 0],
        digest=container_write.digest(tokens), tokens_at=0, dependencies=(),
        content=bytes.fromhex(key),
    )  # fmt: skip


def fill(store: vkv.PromptStore, made: list[bytes], points: int | None = None) -> float:
    """Enter the prompts; seconds for each."""
    start = time.perf_counter()
    with store._index.write() as db:
        for tokens in made:
            key = container_write.digest(tokens).hex()
            listing.add(db, store._layout, write(store, key, tokens, points), time.time(), [])
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


def compare(points: int, count: int) -> None:
    """Print the medians of searches without and with checkpoints, and their ratio."""
    chance = random.Random(count)
    made = prompts(count, chance)
    asked = questions(made, chance)
    with tempfile.TemporaryDirectory() as folder:
        stores = [vkv.PromptStore(Path(folder) / str(n)) for n in (0, points)]
        for store, n in zip(stores, (0, points), strict=True):
            fill(store, made, n)
        times: list[list[float]] = [[], []]
        for _ in range(2):
            for ids, _cut in asked:
                for store, found in zip(stores, times, strict=True):
                    start = time.process_time()
                    store.find(ids, model=MODEL)
                    found.append(1e3 * (time.process_time() - start))
    plain, more = (statistics.median(found) for found in times)
    print(f"{count:,} entries: {plain:.3f} ms, with {points} checkpoints each {more:.3f} ms")


def main() -> None:
    if sys.argv[1:2] == ["--points"]:
        compare(int(sys.argv[2]), int(sys.argv[3]))
        return
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
