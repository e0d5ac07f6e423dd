"""Define what a store may take up."""

from __future__ import annotations

from dataclasses import dataclass

from vkv.store.local import units


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound what a store takes up; ``None`` for no limit.

    Attributes:
        max_bytes: Of all files together.
        max_age: Seconds that an entry may go unused.
        min_free: Bytes that stay free on the disk.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    min_free: int | None = None

    def but(
        self,
        max_bytes: str | int | None,
        max_age: str | float | None,
        min_free: str | int | None,
    ) -> Limits:
        """Return these limits with those replaced that are given, as people write them.

        Raises:
            VkvError: One is not a size, or not an age.
        """
        return Limits(
            self.max_bytes if max_bytes is None else units.size(max_bytes),
            self.max_age if max_age is None else units.age(max_age),
            self.min_free if min_free is None else units.size(min_free),
        )
