"""The results: rows, JSON, and a table for the terminal."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vkv.bench.quality import Quality
from vkv.bench.timing import Timing

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One codec, or one peer, on the same cache.

    Attributes:
        name: The codec string, or the peer's name.
        family: Rows of one family share a colour in the picture.
        bits_keys: Bits per element of the keys' own parts; ``None`` where unknown.
        bits_values: ... of the values' own parts.
        bits: Bits per element all in: bytes of the file over cached elements.
        size: Bytes of the file; of the live cache for a peer without files.
        ratio: Times smaller than fp16.
        error_keys: Squared error over the power about the channel mean.
        error_values: Squared error over the power.
        quality: Distance of the model's predictions from those on the raw cache.
        encode: Seconds to encode everything.
        save: ... to encode, hash, write and flush.
        load: ... to read, verify and decode into live caches.
        decode: ... to decode from memory, unverified.
        peak: Bytes MLX held at most while loading.
        first_token: Seconds from the file to the first logits.
        notes: What was asked for and not done.
    """

    name: str
    family: str
    bits: float
    size: int
    ratio: float
    quality: Quality
    bits_keys: float | None = None
    bits_values: float | None = None
    error_keys: float | None = None
    error_values: float | None = None
    encode: Timing | None = None
    save: Timing | None = None
    load: Timing | None = None
    decode: Timing | None = None
    peak: int | None = None
    first_token: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that could not be measured, and why; the other rows stand."""

    name: str
    reason: str


@dataclass(slots=True)
class Results:
    """All rows of one run, and what they were measured on."""

    model: str
    context: int
    test: int
    elements: int
    first_token_cold: float
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Record what the block raises as the failure of row ``name``."""
        try:
            yield
        except Exception as exc:  # of a codec, MLX or a peer: no other row is lost by it
            text = " ".join(str(exc).split())
            self.failures.append(Failure(name, f"{type(exc).__name__}: {text}"))

    @property
    def fp16_bytes(self) -> int:
        """Return the bytes that MB/s are counted in: the cache as fp16."""
        return 2 * self.elements

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "context": self.context,
            "test": self.test,
            "elements": self.elements,
            "first_token_cold": self.first_token_cold,
            "versions": versions(),
            "machine": machine(),
            "rows": [asdict(row) for row in self.rows],
            "failures": [asdict(failure) for failure in self.failures],
        }

    def write(self, path: Path) -> None:
        """Write ``results.json``."""
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def table(self) -> list[list[str]]:
        """Return header and rows as text."""
        return [list(COLUMNS), *([_cell(self, row, c) for c in COLUMNS] for row in self.rows)]


def versions() -> dict[str, str]:
    """Return the versions of the packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("vkv", "mlx", "mlx-lm", "numpy", "pcodec", "veloxquant-mlx"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Describe the platform, the cores, and the device MLX computes on."""
    import mlx.core as mx

    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "device": str(mx.default_device()),
        "blas": "openblas" if "openblas" in os.environ.get("LD_PRELOAD", "") else "default",
    }


COLUMNS = (
    "codec", "bits K", "bits V", "bits all in", "ratio", "KL", "KL p99", "top-1", "ppl",
    "err K", "err V", "encode MB/s", "save s", "load s", "decode MB/s", "peak MB", "first token s",
)  # fmt: skip


def _cell(results: Results, row: Row, column: str) -> str:
    quality = row.quality
    rate = results.fp16_bytes
    values: dict[str, object] = {
        "codec": row.name,
        "bits K": _number(row.bits_keys, ".2f"),
        "bits V": _number(row.bits_values, ".2f"),
        "bits all in": f"{row.bits:.2f}",
        "ratio": f"{row.ratio:.2f}x",
        "KL": f"{quality.kl:.4f}",
        "KL p99": f"{quality.kl_p99:.3f}",
        "top-1": f"{quality.top1:.3f}",
        "ppl": f"{quality.perplexity:.2f}",
        "err K": _number(row.error_keys, ".4f"),
        "err V": _number(row.error_values, ".4f"),
        "encode MB/s": _number(row.encode.rate(rate) if row.encode else None, ".0f"),
        "save s": _number(row.save.seconds if row.save else None, ".3f"),
        "load s": _number(row.load.seconds if row.load else None, ".3f"),
        "decode MB/s": _number(row.decode.rate(rate) if row.decode else None, ".0f"),
        "peak MB": _number(row.peak and row.peak / 1e6, ".0f"),
        "first token s": _number(row.first_token, ".2f"),
    }
    return str(values[column])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def aligned(table: Iterable[list[str]]) -> str:
    """Pad columns to one width, the first to the left and the others to the right."""
    lines = list(table)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
