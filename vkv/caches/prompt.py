"""Hold a conversation: live caches, the token ids in them, and how a new prompt goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vkv import identity
from vkv.caches import chat
from vkv.caches.checkpoints.record import go_back, keep_fitting, reachable
from vkv.caches.interrupted import is_interrupted, states
from vkv.caches.kinds.live import offsets
from vkv.errors import CacheError
from vkv.format.info import Info


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
        self._unused = _zeros(offsets(cache))
        self._mark()

    def __repr__(self) -> str:
        recorded = "no token ids" if self._ids is None else f"{len(self.tokens or [])} token ids"
        held = "" if self.length is None else f" of {self.length} tokens"
        source = "" if self._info is None else f", from {self._info.path!r}"
        return f"<Prompt: {recorded}{held} in {len(self.cache)} caches{source}>"

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
        known, ids = self._known(), _ids(tokens)
        if not ids:
            raise CacheError("an empty prompt: there is nothing to compute", rule="L8")
        shared = identity.common_prefix(known, ids)
        if shared < at_least and (known or self.length):
            raise CacheError(
                f"the prompt shares {shared} leading tokens with the {len(known)} in the cache, "
                f"expected {at_least} or more; resume(tokens, at_least=0) drops them",
                rule="L8",
            )
        keep = min(shared, len(ids) - 1)
        keep_fitting(self.cache, known)
        if not exact and keep < max(self._lengths(), default=len(known)):
            back = reachable(self.cache, keep)
            keep = keep if back is None else back
        self._cut(keep, len(known))
        self._ids, self._computed = ids, keep
        self._mark()
        return ids[keep:]

    def extend(self, tokens: Any) -> None:
        """Record ids that were computed into the cache since ``resume``, ``turn`` or ``load``.

        Args:
            tokens: Those behind what ``resume`` or ``turn`` returned: what the model
                generated. All of them: their number is compared with the cache.

        Raises:
            CacheError: The cache holds more or fewer tokens than are recorded then (L8).
            VkvError: ``tokens`` are no token ids (I2).
        """
        self._check_whole()
        ids, lengths = (self._ids or []) + _ids(tokens), offsets(self.cache)
        filled = {n for n in lengths if n} or set(lengths)
        if filled - {len(ids)}:
            numbers = " or ".join(map(str, sorted(filled)))
            raise CacheError(
                f"the cache holds {numbers} tokens, {len(ids)} would be recorded: expected "
                "exactly the ids that were computed",
                rule="L8",
            )
        self._unused = _zeros(lengths)
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
            raise CacheError(
                f"the cache holds {self.length} tokens, {len(known)} are recorded; give the ids "
                "that the model generated to extend()",
                rule="L8",
            )
        if (sequences := max(map(_sequences, self.cache), default=1)) > 1:
            raise CacheError(f"{sequences} sequences, a chat goes on from one", rule="L8")
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
            As ``turn``.
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

    def _known(self) -> list[int]:
        """Return the recorded ids that the cache holds (L8)."""
        if self._ids is None:
            raise CacheError(
                "the file holds no token ids, so no prompt can go on from it; "
                "`vkv convert --model … --prompt …` adds them",
                rule="L8",
            )
        self._check_whole()
        if self.length is None and self._computed < len(self._ids):
            raise CacheError(
                f"this cache does not count its tokens, and {len(self._ids) - self._computed} ids "
                "were to be computed; once they are, give those generated since to extend()",
                rule="L8",
            )
        return self.tokens or []

    def _mark(self) -> None:
        """Remember the caches as they are before the next step."""
        self._states, self._marked_length = states(self.cache), self.length

    def _check_whole(self) -> None:
        """Refuse caches of which some took part in a step and others did not (L8)."""
        before, now = self._marked_length, self.length
        grown = None if before is None or now is None else now > before
        if is_interrupted(self._states, states(self.cache), grown):
            raise CacheError(
                "a step was interrupted: some layers hold its tokens and others do not, and "
                "recurrent state cannot go back; load the prompt again, or compute it anew",
                rule="L8",
            )

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


def _zeros(lengths: list[int]) -> set[int]:
    """Return which caches stay empty while others fill: some models never use them."""
    return {i for i, n in enumerate(lengths) if n == 0} if any(lengths) else set()


def _sequences(cache: Any) -> int:
    """Return the number of sequences that a cache holds; 1 where it does not say."""
    if hasattr(cache, "caches"):
        return max(map(_sequences, cache.caches), default=1)
    held = getattr(cache, "keys", None)
    keys = held[0] if isinstance(held, tuple | list) else held
    return 1 if keys is None else int(keys.shape[0])
