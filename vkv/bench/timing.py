"""Times as medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the median of some runs and (largest - smallest) / median."""

    seconds: float
    spread: float

    def rate(self, nbytes: int) -> float:
        """Return MB/s for ``nbytes``."""
        return nbytes / self.seconds / 1e6


def median(call: Callable[[], object], repeat: int) -> Timing:
    """Time ``call`` ``repeat`` times; it must wait for its own results."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    middle = statistics.median(times)
    return Timing(middle, (max(times) - min(times)) / middle)
