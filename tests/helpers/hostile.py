"""Damaged and forged files by the thousand: ``python -m tests.helpers.hostile SEED COUNT FOLDER``.

Each case is a good fixture, changed: bytes flipped, inserted or cut; its JSON rewritten; its
header damaged or rewritten under right lengths and digests; its data rewritten under right
digests. It is inspected, validated and loaded, and a cache that loads is used. Only ``VkvError``
may come out. Runs in a process of its own, so that a crash, a hang and the memory can be seen.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgpack

import vkv
from tests.helpers.memory import peak
from vkv.errors import VkvError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "fixtures" / "write"))

from draft import ITEMSIZE, Draft, Map  # noqa: E402  # the path is set above

NUMBERS = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 1 << 15, 1 << 16,
           (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 47, (1 << 48) - 1, 1 << 48,
           1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 63)]  # fmt: skip
FLOATS = [0.0, -0.0, 1.5, 4.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")]
WORDS = ["", "a", "\0", "ä" * 70, "x" * 200, "1.0", "2.0", "F16", "BF16", "F32", "F64", "C64", "U8",
         "U32", "BOOL", "I64", "raw", "affine", "nsnquant", "kvquant", "tc", "lossless", "kv",
         "quantized", "rotating", "chunked", "arrays", "list", "table", "payload", "keys",
         "rope"]  # fmt: skip
OTHERS = [None, True, False, b"", bytes(32), [], {}, [[[[]]]], {"a": {"b": {"c": []}}}, [0] * 1000,
          [[] for _ in range(200)], {str(i): i for i in range(100)}]  # fmt: skip
POOL = [NUMBERS, NUMBERS, FLOATS, WORDS, OTHERS]
#: Arrays that a case may come to hold: far more than any fixture has.
MAX_DATA = 1 << 16


def opened(data: bytes) -> Draft:
    """A good file as a draft, digests left out, so that they are made anew."""
    n = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:n])
    del table["__metadata__"]
    cut = {k: data[n + e["data_offsets"][0] : n + e["data_offsets"][1]] for k, e in table.items()}
    header = msgpack.unpackb(cut.pop("vkv.header"))
    header.pop("pad", None)
    for stored in header["tensors"].values():
        del stored["digest"]
    if "tokens" in header:
        del header["tokens"]["digest"]
    return Draft(header, cut)


class Mutator:
    """Makes one case after the other from a seed."""

    def __init__(self, seed: int, files: list[bytes]):
        self.random = random.Random(seed)
        self.files = files

    def case(self) -> bytes:
        data = self.random.choice(self.files)
        kinds: list[Callable[[bytes], bytes]] = [
            self.damage,
            self.table,
            *[self.header] * 4,
            self.packed,
            self.text,
            self.data,
        ]
        try:
            return self.random.choice(kinds)(data)
        except (OverflowError, ValueError, TypeError, KeyError, AttributeError):
            return self.damage(data)  # a header that not even msgpack can say

    def damage(self, data: bytes) -> bytes:
        """Bytes flipped, inserted, cut, doubled, or the tail of another file."""
        r = self.random
        for _ in range(r.choice((1, 1, 2, 5))):
            at = (
                r.randrange(len(data) + 1) if r.random() < 0.5 else r.randrange(min(len(data), 400))
            )
            some = r.randrange(1, 17)
            data = r.choice((
                data[:at] + bytes(b ^ 1 << r.randrange(8) for b in data[at:][:1]) + data[at + 1 :],
                data[:at] + r.randbytes(some) + data[at + some :],
                data[:at] + r.randbytes(some) + data[at:],
                data[:at] + data[at + some :],
                data[:at],
                data[:at] + data[max(0, at - 64) : at] + data[at:],
                data[:at] + r.choice(self.files)[at:],
            ))  # fmt: skip
            if not data:
                break
        return data

    def table(self, data: bytes) -> bytes:
        """The JSON rewritten; the header stays as it was."""
        draft = opened(data)

        def edit(table: Map) -> Map:
            self.change(table, 1 + self.random.randrange(3))
            return table

        return draft.build(table=edit)

    def header(self, data: bytes) -> bytes:
        """The header rewritten; lengths, offsets and digests are right."""
        draft = opened(data)
        self.change(draft.header, 1 + self.random.randrange(3))
        self.fit(draft)
        return draft.build()

    def packed(self, data: bytes) -> bytes:
        """Bytes of the header flipped, inserted or cut; the id is right."""
        return opened(data).build(header=self.damage)

    def text(self, data: bytes) -> bytes:
        """The same table in another text."""
        old, new = self.random.choice((
            (b'":', b'": '), (b",", b", "), (b'"vkv.', b'"\\u0076kv.'), (b'{"dtype"', b'{\t"dtype"')
        ))  # fmt: skip
        return opened(data).build(text=lambda raw: raw.replace(old, new, 1))

    def data(self, data: bytes) -> bytes:
        """Stored bytes rewritten; their digests are right."""
        draft, r = opened(data), self.random
        for name in r.sample(sorted(draft.data), min(len(draft.data), 1 + r.randrange(3))):
            old = draft.data[name]
            word = r.choice(
                (bytes(4), b"\xff" * 4, b"\x00\x7c" * 2, b"\x80\x7f" * 2, r.randbytes(4))
            )
            draft.data[name] = r.choice(
                (r.randbytes(len(old)), (word * (len(old) // 4 + 1))[: len(old)], old[::-1])
            )
        return draft.build()

    def change(self, tree: Map, count: int) -> None:
        """Change values in places of a nested map."""
        r = self.random
        for _ in range(count):
            places = _places(tree)
            if not places:
                return
            place, key = r.choice(places)
            other, twin = r.choice(places)
            action = r.randrange(10)
            if action == 0:
                del place[key]
            elif action == 1:
                place[key] = copy.deepcopy(other[twin])
            elif action == 2 and isinstance(place, dict):
                place[r.choice(WORDS)] = copy.deepcopy(place[key])
            elif action == 3 and isinstance(place, list):
                place.extend(copy.deepcopy(place[key]) for _ in range(r.choice((1, 2, 300))))
            elif action < 7 and type(place[key]) is int:
                place[key] += r.choice((-1, 1, 1, 2, 8, 32, -place[key]))
            elif action < 7:
                like = [p[k] for p, k in places if type(p[k]) is type(place[key])]
                place[key] = copy.deepcopy(r.choice(like))
            else:
                place[key] = copy.deepcopy(r.choice(r.choice(POOL)))

    def fit(self, draft: Draft) -> None:
        """Give stored tensors the bytes that their changed shapes ask for."""
        tensors = draft.header.get("tensors")
        tensors = tensors if isinstance(tensors, dict) else {}
        for name in tensors:
            size, have = _size(tensors[name]), draft.data.get(name, b"\x01")
            if size is None:  # the container must be right for the header to be looked at
                draft.forms[name] = {"dtype": "U8", "shape": [len(have)]}
            else:
                have = (have * (size // max(1, len(have)) + 1))[:size]
            draft.data[name] = have
        if self.random.random() < 0.9:
            draft.data = {name: draft.data[name] for name in tensors}


def _size(info: Any) -> int | None:
    """Bytes of a stored tensor, if they are few and its form is one the container allows."""
    try:
        sizes, item = info["shape"], ITEMSIZE[info["dtype"]]
    except (TypeError, KeyError):
        return None
    if not isinstance(sizes, list) or len(sizes) > 8:
        return None
    whole = all(type(n) is int and 0 <= n < 1 << 48 for n in sizes)
    return prod(sizes) * item if whole and prod(sizes) <= MAX_DATA else None


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found = []
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        found.append((tree, key))
        if isinstance(tree[key], dict | list):
            found += _places(tree[key])
    return found


def examine(path: Path, outcomes: Counter[str]) -> None:
    """All that a stranger's file may meet."""
    found = attempt(path)
    report = vkv.validate(path, deep=True)
    errors = {f.rule for f in report.findings if f.severity == "error"}
    if isinstance(found, VkvError):
        outcomes[f"{found.rule}"] += 1
        assert str(found).encode()  # it can be printed, whatever stood in the file
        # what does not load is not called sound, but for a basis, which is no cache
        assert errors or found.rule == "L9", found
        return
    outcomes["loaded"] += 1
    assert errors <= {"D2"}, report.findings  # ... and the other way round
    for cache in found.cache:
        use(cache)


def attempt(path: Path) -> vkv.Prompt | VkvError:
    """Inspect and load, and return what comes of it."""
    try:
        info = vkv.inspect(path)
        assert info.accounting.adds_up
        assert info.to_dict()
        return vkv.load(path)
    except VkvError as exc:
        return exc


def use(cache: Any) -> None:
    """What mlx-lm does with a cache. It may refuse odd numbers; it must not bring us down."""
    for child in getattr(cache, "caches", ()):
        use(child)
    try:
        mx.eval(cache.state)
        keys = cache.keys[0] if isinstance(cache.keys, tuple) else cache.keys
        heads, dim = keys.shape[1], getattr(cache, "group_size", keys.shape[-1])
        token = mx.ones((keys.shape[0], heads, 1, dim), mx.float16)
        cache.trim(1)
        mx.eval(cache.update_and_fetch(token, token))
    except (AttributeError, TypeError, ValueError, OverflowError, ZeroDivisionError, IndexError):
        pass


def main(seed: int, count: int, folder: Path) -> None:
    """Run the cases and print what came out, as JSON."""
    files = [p.read_bytes() for p in sorted((ROOT / "fixtures/v1/good").glob("*.vkv"))]
    path, outcomes = folder / f"case-{seed}.vkv", Counter[str]()
    for other in (ROOT / "fixtures/v1/good" / f"{name}.vkv" for name in ("basis", "files-parent")):
        shutil.copy(other, folder)  # one of the others stands on it
    for data in files:  # buffers and modules that any use brings in
        path.write_bytes(data)
        examine(path, outcomes)
    assert outcomes == {"loaded": len(files) - 1, "L9": 1}, outcomes
    before, worst, outcomes = peak(), 0.0, Counter[str]()
    mutator = Mutator(seed, files)
    for i in range(count):
        data = mutator.case()
        path.write_bytes(data)
        start = time.process_time()
        try:
            examine(path, outcomes)
        except Exception:
            kept = folder / f"failed-{seed}-{i}.vkv"
            kept.write_bytes(data)
            print(f"case {i} of seed {seed}, kept as {kept}", file=sys.stderr)
            traceback.print_exc()
            sys.exit(1)
        worst = max(worst, time.process_time() - start)
    grown = (peak() - before) / 2**20
    print(json.dumps({"worst_s": worst, "grown_mb": grown, "outcomes": outcomes.most_common()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
