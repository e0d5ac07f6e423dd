"""Two pictures of the results: KL over bits, and load time over file size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vkv.bench.report import Results, Row
from vkv.errors import VkvError

#: Rows nearer to the raw cache are left out: raw is exactly 0, which no logarithm has.
FLOOR = 1e-6


def draw(results: Results, folder: Path) -> list[Path]:
    """Write ``kl.png`` and ``load.png``.

    Raises:
        VkvError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise VkvError(
            "the pictures need matplotlib: pip install 'vkv[bench]'", at="bench"
        ) from None
    matplotlib.use("Agg")
    title = f"{results.model}, {results.context} tokens of context, {results.test} of test"
    quality = [r for r in results.rows if r.quality.kl > FLOOR]
    loads = [r for r in results.rows if r.load is not None]
    return [
        _scatter(
            folder / "kl.png",
            quality,
            lambda r: (r.bits, r.quality.kl),
            ("bits per element, all in", "KL to the raw cache, nats (lower is better)", title),
            log=(False, True),
        ),
        _scatter(
            folder / "load.png",
            loads,
            lambda r: (r.size / 1e6, r.load.seconds if r.load else 0.0),
            ("file size, MB", "load time, s (read, verify, decode)", title),
            log=(True, False),
        ),
    ]


def _scatter(
    path: Path,
    rows: list[Row],
    point: Callable[[Row], tuple[float, float]],
    texts: tuple[str, str, str],
    log: tuple[bool, bool],
) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 6.5), layout="constrained")
    families = list(dict.fromkeys(row.family for row in rows))
    colours = {family: f"C{i % 10}" for i, family in enumerate(families)}
    for number, row in enumerate(rows, 1):
        label = f"{number}  {row.name}"
        axes.plot(*point(row), "o", color=colours[row.family], label=label, alpha=0.85)
    axes.set(xlabel=texts[0], ylabel=texts[1], title=texts[2])
    if log[0]:
        axes.set_xscale("log")
    if log[1]:
        axes.set_yscale("log")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.margins(0.08)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    _label(figure, axes, [(str(i), *point(row)) for i, row in enumerate(rows, 1)])
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


#: Where a label may stand, in points from its mark: near places first.
PLACES = [
    (dx * r, dy * r)
    for r in (6, 10, 15, 21, 28, 36)
    for dx, dy in ((1, 0.6), (1, -1.2), (-1, 0.6), (-1, -1.2), (0, 1.4), (0, -2.0))
]


def _label(figure: Any, axes: Any, marks: list[tuple[str, float, float]]) -> None:
    """Put each number at the nearest place where it covers no other label and no mark."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    taken = [_around(axes.transData.transform((x, y))) for _, x, y in marks]
    for name, x, y in sorted(marks, key=lambda m: (m[1], m[2])):
        for i, (dx, dy) in enumerate(PLACES):
            text = axes.annotate(
                name,
                (x, y),
                xytext=(dx, dy),
                textcoords="offset points",
                fontsize=9,
                ha="left" if dx > 0 else "right" if dx < 0 else "center",
                arrowprops={"arrowstyle": "-", "lw": 0.5, "alpha": 0.5} if i >= 6 else None,
            )
            box = _box(text.get_window_extent(renderer))
            inside = axes.bbox.x0 <= box[0] and box[2] <= axes.bbox.x1
            inside = inside and axes.bbox.y0 <= box[1] and box[3] <= axes.bbox.y1
            if (inside and not any(_meet(box, t) for t in taken)) or i == len(PLACES) - 1:
                taken.append(box)
                break
            text.remove()


Box = tuple[float, float, float, float]


def _around(center: Any, radius: float = 5) -> Box:
    x, y = center
    return x - radius, y - radius, x + radius, y + radius


def _box(extent: Any) -> Box:
    return extent.x0 - 1, extent.y0 - 1, extent.x1 + 1, extent.y1 + 1


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
