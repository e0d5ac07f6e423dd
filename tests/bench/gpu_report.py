"""The results: printed as they come, then as JSON and as Markdown."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
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
            "command": " ".join(["python -m tests.bench.gpu", *sys.argv[1:]]),
            "tokens": tokens,
            "layers": layers,
            "versions": versions(),
            "machine": machine(),
            "device": {k: v for k, v in mx.device_info().items() if isinstance(v, str | int)},
            "rates": {},
            "seconds": {},
            "bytes": {},
            "steps": [],
        }

    def time(self, name: str, times: Times) -> None:
        self._found["seconds"][name] = {"median": statistics.median(times), "all": times}
        print(f"{name:45} {statistics.median(times):9.3f} s  {times}", flush=True)

    def size(self, name: str, nbytes: int) -> None:
        self._found["bytes"][name] = nbytes
        print(f"{name:45} {nbytes / 1e6:9.0f} MB", flush=True)

    def rate(self, name: str, nbytes: int, times: Times) -> None:
        self._found["rates"][name] = rate = nbytes / min(times) / 1e9
        print(f"{name:45} {rate:9.1f} GB/s", flush=True)

    def step(
        self, tokens: int, name: str, seconds: float, dense: float, held: int, peak: int
    ) -> None:
        """``held``: bytes of the caches; ``peak``: what a step takes beside them."""
        row = {"tokens": tokens, "cache": name, "seconds": seconds, "times": seconds / dense}
        self._found["steps"].append({**row, "held": held, "peak": peak})
        print(
            f"step at {tokens}, {name:25} {seconds * 1e3:9.2f} ms, {seconds / dense:5.2f} times, "
            f"{held / 1e6:9.0f} MB held, {peak / 1e6:9.0f} MB more at the peak",
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
            "One run; medians of its repeats; files in the page cache.\n"
        )
        rows = [[n, f"{s['median']:.3f}"] for n, s in f["seconds"].items()]
        sizes = [[n, f"{b / 1e6:,.0f}"] for n, b in f["bytes"].items()]
        rates = [[n, f"{r:,.1f}"] for n, r in f["rates"].items()]
        steps = [
            [f"{s['tokens']:,}", s["cache"], f"{s['seconds'] * 1e3:.2f}", f"{s['times']:.2f}",
             f"{s['held'] / 1e6:,.0f}", f"{s['peak'] / 1e6:,.0f}"]
            for s in f["steps"]
        ]  # fmt: skip
        tables = [
            _table(["", "s"], rows),
            _table(["file", "MB"], sizes),
            _table(["what this machine does at best", "GB/s"], rates),
            _table(["past", "cache", "ms a step", "of dense", "MB held", "MB more at peak"], steps),
        ]
        return "\n".join([head, *tables])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
