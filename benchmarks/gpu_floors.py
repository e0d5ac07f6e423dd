"""What nothing can beat: bytes that must move over the rates at which this machine moves them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
from blake3 import blake3

from benchmarks.gpu_report import Report, timed

SIZE, PIECE = 1 << 30, 1 << 25


def floors(report: Report, folder: Path) -> None:
    """Rates in GB/s: device memory, file to memory, hash, file written and flushed."""
    x = mx.zeros((SIZE // 4,), mx.float32)
    mx.eval(x)
    report.rate("device memory, read and written", 2 * SIZE, timed(lambda: mx.eval(x + 1), 5))
    path, data = folder / "floor", os.urandom(PIECE)
    places = range(0, SIZE, PIECE)
    with path.open("wb") as out:
        report.rate("file written", SIZE, timed(lambda: [out.write(data) for _ in places], 1))
        report.rate("file flushed", SIZE, timed(lambda: os.fsync(out.fileno()), 1))
    threads = min(16, os.cpu_count() or 1)
    buffers = [bytearray(PIECE) for _ in range(threads)]
    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:

        def read(start: int) -> None:
            os.preadv(file.fileno(), [buffers[start // PIECE % threads]], start)

        taken = timed(lambda: list(pool.map(read, places)), 3)
        report.rate(f"file read, {threads} threads", SIZE, taken)
        taken = timed(lambda: list(pool.map(lambda _: blake3(data).digest(), places)), 3)
        report.rate(f"BLAKE3, {threads} threads", SIZE, taken)
    path.unlink()
