"""Verify digests beside the work that uses the bytes, and answer for all of them at the end."""

from __future__ import annotations

from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self


class DeferredVerification:
    """Digest checks that run in threads until the block exits.

    What is read inside the block may be used before its digest is compared, so nothing
    may leave the block but through its end::

        with DeferredVerification() as deferred:
            x = file.array(name, deferred=deferred)

    Raises:
        DigestError: At the end of the block: the bytes of a tensor changed (D1).
    """

    def __init__(self) -> None:
        self._checks: list[Future[None]] = []

    def add(self, check: Future[None]) -> None:
        """Take charge of a check that was started."""
        self._checks.append(check)

    def flush(self) -> None:
        """Wait for all checks, and raise what the first that failed raised."""
        checks, self._checks = self._checks, []
        wait(checks)
        for check in checks:
            check.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()
        else:  # the first error is the one to raise; no thread may go on after the block
            wait(self._checks)
