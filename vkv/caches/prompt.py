"""Hold a conversation: live caches, the token ids in them, and how a new prompt goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vkv import identity
from vkv.caches import chat, prompt_errors
from vkv.caches.checkpoints.record import (
    check_point,
    checkpoints_of,
    go_back,
    keep_fitting,
    reachable,
)
from vkv.caches.interrupted import Mark, states
from vkv.caches.kinds.live import offsets, sequences, unused
from vkv.caches.notebook import prompt_table
from vkv.errors import CacheError
from vkv.format.info import Info
from vkv.format.notebook import place


class Prompt:
    """Live caches, and the token ids that were computed into them.

    ``vkv.load`` returns one; ``Prompt(cache, [])`` starts with a fresh cache. ``resume``,
    ``turn`` and ``chat`` fit the cache to what comes next, any number of times and in any
    order. After ``resume`` or ``turn`` the caller computes the ids they return, and tells
    the ids that a model generated behind them to ``extend``; ``chat`` does all of it.

    How many tokens are in the cache is read from the cache itself. A cache of recurrent
    state alone does not count them: there every id computed must be told to ``extend``.

    Attributes:
        cache: One mlx-lm cache per layer, to be passed on as ``prompt_cache``.
        notes: Which caches are not packed although that was asked for, why, and their bytes.
    """

    def __init__(
        self,
        cache: list[Any],
        tokens: list[int] | None,
        info: Info | None = None,
        notes: Sequence[str] = (),
    ):
        self.cache, self._info, self.notes = cache, info, list(notes)
        self._ids = None if tokens is None else list(tokens)
        self._computed = 0 if tokens is None else len(tokens)
        self._unused = unused(offsets(cache))
        self._mark()

    def __repr__(self) -> str:
        recorded = "no token ids" if self._ids is None else f"{len(self.tokens or [])} token ids"
        held = "" if self.length is None else f" of {self.length} tokens"
        source = "" if self._info is None else f", from {place(self._info.path)!r}"
        return f"<Prompt: {recorded}{held} in {len(self.cache)} caches{source}>"

    _repr_html_ = prompt_table

    @property
    def info(self) -> Info:
        """The file that the cache was loaded from, as ``vkv.inspect`` describes it.

        Raises:
            CacheError: It was loaded from no file.
        """
        if self._info is None:
            raise CacheError("this prompt was not loaded from a file")
        return self._info

    @property
    def length(self) -> int | None:
        """Tokens that every layer holds now; ``None`` if no layer counts them.

        An interrupted step leaves some layers longer than others; they are cut at the
        next ``resume``.
        """
        return min(self._lengths(), default=None)

    @property
    def tokens(self) -> list[int] | None:
        """Ids that the cache holds, as far as they are recorded; ``None`` if none ever were."""
        if self._ids is None:
            return None
        return self._ids[: self._computed if self.length is None else self.length]

    def resume(self, tokens: Any, *, at_least: int = 1, exact: bool = False) -> list[int]:
        """Fit the cache to a new prompt and return the ids still to be computed.

        The cache is cut, in place, to the longest common prefix, and to one token less
        than ``tokens`` at most: without a token to compute there are no logits. Tokens
        that are not recorded are cut off. Where a layer cannot be cut there, all go back to the
        last checkpoint before (``vkv.prefill``). Either all layers go back or none.

        Args:
            tokens: The whole new prompt, as ``vkv.save`` takes ids.
            at_least: Refuse a prompt that shares fewer leading tokens with the cache, and
                leave the cache as it is; 0 lets an unrelated prompt empty it.
            exact: Refuse to go back to a checkpoint before the common prefix.

        Returns:
            The rest of ``tokens``; at least one id.

        Raises:
            CacheError: No token ids are recorded, ``tokens`` is empty or unrelated, or a
                layer cannot go back so far (recurrent, or a ring that has wrapped) (L8).
            VkvError: ``tokens`` are no token ids (I2).
        """
        trouble, known, ids = self._trouble(), self._recorded(), _ids(tokens)
        if not ids:
            raise CacheError("an empty prompt: there is nothing to compute", rule="L8")
        shared = identity.common_prefix(known, ids)
        if shared < at_least and (known or self.length):
            raise prompt_errors.unrelated(shared, len(known), at_least)
        keep = min(shared, len(ids) - 1)
        keep_fitting(self.cache, known)
        back = None
        if not exact and (trouble or keep < max(self._lengths(), default=len(known))):
            back = reachable(self.cache, keep)
        if trouble is not None and back is None:
            raise trouble
        keep = keep if back is None else back
        self._cut(keep, len(known))
        self._ids, self._computed = ids, keep
        self._mark()
        return ids[keep:]

    def rewind(self, tokens: int) -> int:
        """Go back in place: to so many tokens, or to the last checkpoint before.

        Args:
            tokens: How many; more than the cache holds leave it as it is.

        Returns:
            How many tokens the cache holds then.

        Raises:
            CacheError: There is no such point, or nothing counts the tokens (L8).
            VkvError: ``tokens`` is no whole number above 0.
        """
        check_point(tokens)
        held = self.length if self._ids is None else len(self._known())
        if held is None:
            raise prompt_errors.no_ids()
        back = held if tokens >= held else reachable(self.cache, tokens)
        if back is None:
            points = [c.tokens for c in checkpoints_of(self.cache)]
            raise prompt_errors.no_point(tokens, points, held)
        self._cut(back, held)
        self._ids, self._computed = self._ids and self._ids[:back], back
        self._mark()
        return back

    def extend(self, tokens: Any) -> None:
        """Record ids that were computed into the cache since ``resume``, ``turn`` or ``load``.

        Args:
            tokens: Those behind what ``resume`` or ``turn`` returned: what the model
                generated. All of them: their number is compared with the cache.

        Raises:
            CacheError: The cache holds more or fewer tokens than are recorded then (L8).
            VkvError: ``tokens`` are no token ids (I2).
        """
        if self._marked.is_interrupted(self.cache, self.length):
            raise prompt_errors.interrupted()
        ids, lengths = (self._ids or []) + _ids(tokens), offsets(self.cache)
        filled = {n for n in lengths if n} or set(lengths)
        if filled - {len(ids)}:
            raise prompt_errors.miscounted(filled, len(ids))
        self._unused = unused(lengths)
        self._ids, self._computed = ids, len(ids)
        self._mark()

    def turn(self, tokenizer: Any, text: str, *, plain: bool = False, **options: Any) -> list[int]:
        """Fit the cache to one more message and return the ids still to be computed.

        ``tokens`` and what is returned encode the whole conversation. The cache is cut by
        a few tokens where old and new text join into other tokens; a cache that cannot be
        cut keeps the ids it has.

        Args:
            tokenizer: The tokenizer of the model.
            text: A message of the user, or the rest of one that is open.
            plain: No chat template: ``text`` follows as it is.
            options: Passed on to the template.

        Raises:
            CacheError: Token ids are missing, there are several sequences, or there is nothing
                to compute (L8).
            VkvError: The template refuses the message.
        """
        known = self._known()
        if self.length not in (None, len(known)):
            raise prompt_errors.unextended(self.length, len(known))
        if (batch := max(map(sequences, self.cache), default=1)) > 1:
            raise CacheError(f"{batch} sequences, a chat goes on from one", rule="L8")
        joined, appended = chat.continued(tokenizer, known, text, plain=plain, **options)
        if joined is not None:
            try:
                return self.resume(joined, at_least=0, exact=True)
            except CacheError:
                pass  # a cache that cannot be cut keeps its ids
        return self.resume(appended)

    def chat(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Answer one more message of the user, and record the answer.

        Args:
            model: An mlx-lm model.
            tokenizer: Its tokenizer, of ``mlx_lm.load``.
            text: As ``turn`` takes it.
            template: Options of the chat template.
            options: Passed on to ``mlx_lm.stream_generate``: ``max_tokens``, ``sampler``, …

        Yields:
            What ``mlx_lm.stream_generate`` yields: one response a token, with ``text``.

        Raises:
            CacheError, VkvError: As ``turn``.
        """
        from mlx_lm import stream_generate

        rest = self.turn(tokenizer, text, **(template or {}))
        answer: list[int] = []
        whole = False
        try:
            for response in stream_generate(
                model, tokenizer, rest, prompt_cache=self.cache, **options
            ):
                answer.append(response.token)
                yield response
            whole = True
        except GeneratorExit:  # the caller stops between two steps
            whole = True
            raise
        finally:
            self._ids = (self._ids or []) + answer
            # After a fault a cache that does not count its tokens holds nobody knows how many.
            if whole or self.length is not None:
                self._computed = len(self._ids)
            if whole:
                self._mark()

    def _lengths(self) -> list[int]:
        return [n for i, n in enumerate(offsets(self.cache)) if i not in self._unused]

    def settled(self) -> list[int] | None:
        """Return the ids that the cache holds, for a save; ``None`` if none are recorded.

        Raises:
            CacheError: The cache does not count its tokens, and some were not computed (L8).
        """
        return None if self._ids is None else self._known()

    def _recorded(self) -> list[int]:
        """Return the recorded ids that the cache holds (L8)."""
        if (ids := self.tokens) is None:
            raise prompt_errors.no_ids()
        return ids

    def _known(self) -> list[int]:
        """Return the recorded ids, if the caches hold exactly what they say (L8)."""
        ids = self._recorded()
        if (trouble := self._trouble()) is not None:
            raise trouble
        return ids

    def _mark(self) -> None:
        planned = None if self._ids is None else len(self._ids)
        self._marked = Mark(states(self.cache), self.length, planned)

    def _trouble(self) -> CacheError | None:
        """Return why it is not known what the caches hold, if it is not (L8)."""
        ids = self._ids or []
        if self.length is None and self._computed < len(ids):
            return prompt_errors.uncounted(len(ids) - self._computed)
        broken = self._marked.is_interrupted(self.cache, self.length)
        return prompt_errors.interrupted() if broken else None

    def _cut(self, keep: int, known: int) -> None:
        held = max(self._lengths(), default=known)
        try:
            go_back(self.cache, keep, held)
        except CacheError as exc:
            if held <= known:
                raise
            text = f"{exc.message}; {held - known} tokens in it are not recorded, see extend()"
            raise CacheError(text, rule=exc.rule, at=exc.at) from None


def _ids(tokens: Any) -> list[int]:
    """Return token ids as plain numbers (I2)."""
    return list(memoryview(identity.token_bytes(tokens)).cast("I"))
