"""The results: printed as they come, then as JSON and as Markdown."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from vkv.bench.report import machine, versions

Times = list[float]


def timed(call: Callable[[], Any], repeat: int) -> Times:
    """Seconds of each of ``repeat`` calls, the device's work included."""
    times = []
    for _ in range(repeat):
        mx.synchronize()
        start = time.perf_counter()
        call()
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return times


class Report:
    """Rows of one run."""

    def __init__(self, tokens: int, layers: int, folder: Path):
        self._folder = folder
        self._found: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
            "tokens": tokens,
            "layers": layers,
            "versions": versions(),
            "machine": machine(),
            "device": {k: v for k, v in mx.device_info().items() if isinstance(v, str | int)},
            "rates": {},
            "seconds": {},
            "bytes": {},
            "first": {},
            "steps": [],
            "attention": [],
        }

    def keep(self) -> None:
        """Keep the rows of the last run that this one does not make again."""
        path = self._folder / "gpu.json"
        if not path.exists():
            return
        old = json.loads(path.read_text())
        for name in ("rates", "seconds", "bytes", "first"):
            self._found[name] = old[name]
        before = f"{old['command']} of {old['date']}"
        self._found["kept"] = old.get("kept", before)

    def attention(self, tokens: int, name: str, times: Times) -> None:
        """Print and keep the seconds of one call."""
        median = statistics.median(times)
        self._found["attention"].append({"tokens": tokens, "cache": name, "seconds": median})
        print(f"attention at {tokens}, {name:20} {median * 1e6:8.1f} us", flush=True)

    def time(self, name: str, times: Times) -> None:
        self._found["seconds"][name] = {"best": min(times), "all": times}
        print(f"{name:45} {min(times):9.3f} s  {times}", flush=True)

    def size(self, name: str, nbytes: int) -> None:
        self._found["bytes"][name] = nbytes
        print(f"{name:45} {nbytes / 1e6:9.0f} MB", flush=True)

    def rate(self, name: str, nbytes: int, times: Times) -> None:
        self._found["rates"][name] = rate = nbytes / min(times) / 1e9
        print(f"{name:45} {rate:9.1f} GB/s", flush=True)

    @contextmanager
    def first(self, name: str) -> Iterator[None]:
        """Time what MLX compiles, once a machine, when ``name`` is first used."""
        start = time.perf_counter()
        yield
        self._found["first"][name] = taken = time.perf_counter() - start
        print(f"{name + ', first use':45} {taken:9.3f} s", flush=True)

    def step(
        self, tokens: int, name: str, times: Times, dense: Times, held: int, peak: int
    ) -> None:
        """``held``: bytes of the caches; ``peak``: what a step takes beside them."""
        median, mean = statistics.median(times), statistics.mean(times)
        row = {"tokens": tokens, "cache": name, "median": median, "mean": mean}
        row |= {"times": median / statistics.median(dense), "held": held, "peak": peak}
        self._found["steps"].append(row)
        print(
            f"step at {tokens}, {name:25} {median * 1e3:8.2f} ms, mean {mean * 1e3:8.2f} ms, "
            f"{row['times']:5.2f} times, {held / 1e6:8.0f} MB held, {peak / 1e6:8.0f} MB more",
            flush=True,
        )

    def write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "gpu.json").write_text(json.dumps(self._found, indent=2) + "\n")
        (self._folder / "gpu.md").write_text(self._markdown())

    def _markdown(self) -> str:
        f = self._found
        device = f["device"].get("device_name", "unknown device")
        cores, made = f["machine"]["cores"], ", ".join(f"{n} {v}" for n, v in f["versions"].items())
        head = (
            f"# {f['tokens']:,} tokens of an 8B-shaped model\n\n{f['layers']} layers, 8 KV heads, "
            f"head dim 128, bf16. `{f['command']}`, {f['date']}, {device}, {cores} cores, {made}.\n"
            "One run, the best of its repeats; files in the page cache.\n"
        )
        if "kept" in f:
            head += f"Steps and attention alone; the other tables are of {f['kept']}.\n"
        rows = [[n, f"{s['best']:.3f}"] for n, s in f["seconds"].items()]
        sizes = [[n, f"{b / 1e6:,.0f}"] for n, b in f["bytes"].items()]
        rates = [[n, f"{r:,.1f}"] for n, r in f["rates"].items()]
        first = [[n, f"{t:.1f}"] for n, t in f["first"].items()]
        steps = [
            [f"{s['tokens']:,}", s["cache"], f"{s['median'] * 1e3:.2f}", f"{s['times']:.2f}",
             f"{s['mean'] * 1e3:.2f}", f"{s['held'] / 1e6:,.0f}", f"{s['peak'] / 1e6:,.0f}"]
            for s in f["steps"]
        ]  # fmt: skip
        alone = [
            [f"{a['tokens']:,}", a["cache"], f"{a['seconds'] * 1e6:,.0f}"] for a in f["attention"]
        ]
        past = ["past", "cache", "ms a step", "of dense", "mean ms", "MB held", "MB more at peak"]
        tables = [
            _table(["", "s"], rows),
            _table(["file", "MB"], sizes),
            _table(past, steps),
            _table(["past", "attention of one token, one layer", "µs"], alone),
            _table(["what this machine does at best", "GB/s"], rates),
            _table(["first use: MLX compiles and keeps kernels", "s"], first),
        ]
        return "\n".join([head, *tables])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
