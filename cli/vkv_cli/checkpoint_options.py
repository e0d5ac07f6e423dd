"""The options that say where checkpoints are taken, and what they may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import click

Points = list[int] | int | Literal["messages"] | None


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """``--checkpoints``, ``--checkpoint-every`` and ``--checkpoint-share``.

    Attributes:
        checkpoints: ``"messages"``, ``"none"``, or token counts; ``None`` if not given.
        checkpoint_every: One checkpoint after every so many tokens.
        checkpoint_share: As ``vkv.prefill`` takes it.
    """

    checkpoints: str | list[int] | None
    checkpoint_every: int | None
    checkpoint_share: float | None

    @property
    def given(self) -> bool:
        """Return whether checkpoints were asked for."""
        return self.checkpoints not in (None, "none") or self.checkpoint_every is not None

    def points(self, default: Points) -> Points:
        """Return ``checkpoints`` of ``vkv.prefill``.

        Args:
            default: What stands for options that are not given.
        """
        if self.checkpoint_every is not None:
            if self.checkpoints is not None:
                raise click.UsageError("give one of --checkpoints and --checkpoint-every.")
            return self.checkpoint_every
        if self.checkpoints is None:
            return default
        return None if self.checkpoints == "none" else self.checkpoints  # type: ignore[return-value]


def _points(_: click.Context, param: click.Parameter, value: str | None) -> Any:
    if value in (None, "none", "messages"):
        return value
    parts = str(value).split(",")
    if not all(part.strip().isascii() and part.strip().isdecimal() for part in parts):
        text = f"{value!r} is none of messages, none, or token counts like 900,2000"
        raise click.BadParameter(text, param=param)
    return [int(part) for part in parts]


def _share(_: click.Context, param: click.Parameter, value: float | None) -> float | None:
    from vkv.caches.checkpoints.cap import check_share  # brings MLX
    from vkv.errors import VkvError

    if value is not None:
        try:
            check_share(value)
        except VkvError as exc:
            raise click.BadParameter(exc.message, param=param) from None
    return value


checkpoints_option = click.option(
    "--checkpoints", metavar="messages|none|N,N,…", callback=_points,
    help="Points that a later prompt can go back to, where a cache cannot be cut: at the ends "
    "of messages, or after so many tokens.  [default: messages, for such caches]",
)  # fmt: skip
every_option = click.option(
    "--checkpoint-every", type=click.IntRange(1), metavar="N",
    help="One such point after every N tokens.",
)  # fmt: skip
share_option = click.option(
    "--checkpoint-share", type=float, callback=_share, metavar="X",
    help="What they may cost, over the cache; the oldest are dropped first.  "
    "[default: 0.3; no limit for N,N,…]",
)  # fmt: skip
