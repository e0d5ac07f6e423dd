"""``vkv.load``: a file to live caches."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any, Literal, get_args

import mlx.core as mx

from vkv import identity
from vkv.arrays.cache_file import CacheFile, open_file
from vkv.arrays.reader import HASHERS
from vkv.caches.kinds.adapter import Loaded
from vkv.caches.kinds.live import make
from vkv.caches.loading import compatibility as shape
from vkv.caches.loading.decode import decode
from vkv.caches.packed.stored import packed_layer
from vkv.caches.prompt import Prompt
from vkv.caches.provenance import Provenance, attach
from vkv.caches.saving.request import Progress
from vkv.codecs import registry
from vkv.errors import CacheError, MismatchError
from vkv.format.dependencies import SearchPath
from vkv.format.info import of_document
from vkv.format.kinds import KINDS
from vkv.format.layer_rules import check_cache, check_layers, is_basis
from vkv.format.schema import Header, Layer
from vkv.identity.heads import check_heads

#: Form of loaded caches: mlx-lm's own classes, or caches that keep the compressed bytes.
LiveForm = Literal["dense", "packed"]
#: Bytes read ahead of the layer that is decoded: enough to keep two streams of reads busy.
AHEAD = 1 << 27
#: ... and tensors: each is read and hashed by one thread.
TENSORS_AHEAD = 2 * HASHERS


def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    tokenizer: Any = None,
    live: LiveForm = "dense",
    search_paths: Iterable[SearchPath] | None = None,
    basis: SearchPath | None = None,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Prompt:
    """Turn a file back into live mlx-lm caches.

    Args:
        path: A ``.vkv`` file, or a URL as ``vkv.inspect`` takes it.
        model: The model that will go on from the cache; a file made with another
            one is refused, naming what differs.
        tokenizer: Its tokenizer, compared likewise. Another chat template only warns.
        live: ``"dense"`` for mlx-lm's own cache classes; ``"packed"`` for caches that
            hold the codes of the file and decode on fetch, where a layer has codes.
        search_paths: Files, and folders of files, where those are found that this one
            stands on; its own folder if not given.
        basis: One more such file: that of ``vkv.train_basis``.
        force: Load in spite of differences, with a warning.
        verify: Check the digest of every tensor that is read.
        progress: Called with (bytes done, bytes in all).

    Returns:
        The caches, the token ids, and the description of the file.

    Raises:
        MismatchError: The file belongs to another model or tokenizer (I1).
        MissingFileError: It stands on a file that was not found (H12).
        VkvError: The file is damaged, or needs what this build lacks.
        OSError: It cannot be opened.
    """
    check_live(live)
    more = () if basis is None else (basis,)
    file = open_file(path, verify=verify, search_paths=search_paths, more=more)
    try:
        check_cache(file.header)
        check_layers(file.header)
        check_heads(file.header)
        check_owner(file.header, model, tokenizer, force=force)
        with file.unsettled():
            cache = _caches(file, _Progress(file, progress), live == "packed")
        prompt = Prompt(cache, file.document.tokens(), of_document(file.document))
    except BaseException:
        file.close()
        raise
    return prompt


def check_live(live: LiveForm) -> None:
    """Refuse what ``live`` of ``load`` cannot be."""
    if live not in get_args(LiveForm):
        raise CacheError(f"live={live!r}, expected one of {get_args(LiveForm)}")


def _caches(file: CacheFile, count: _Progress, packed: bool) -> list[Any]:
    """Layer by layer, while the next ones are read."""
    cache: list[Any] = []
    ahead = _Ahead(file)
    for i, layer in enumerate(file.header.layers):
        ahead.read(i)
        codes = packed_layer(file, layer, f"layers[{i}]") if packed else None
        cache.append(codes or _layer(file, layer, f"layers[{i}]", count))
    return cache


class _Ahead:
    """Starts reading layers before they are asked for, so many bytes ahead."""

    def __init__(self, file: CacheFile):
        self._file, self._layers = file, file.header.layers
        self._started = self._bytes = self._tensors = 0

    def read(self, index: int) -> None:
        """``index`` is asked for; the one behind it is read whatever its size."""
        if index:
            self._count(index - 1, -1)
        while self._started < len(self._layers) and self._wanted(index):
            self._file.prefetch(_stored(self._layers[self._started]))
            self._count(self._started, 1)
            self._started += 1

    def _wanted(self, index: int) -> bool:
        return self._started < index + 2 or self._bytes < AHEAD or self._tensors < TENSORS_AHEAD

    def _count(self, index: int, sign: int) -> None:
        names = _stored(self._layers[index])
        self._tensors += sign * len(names)
        self._bytes += sign * sum(self._file.header.tensors[name].nbytes for name in names)


def check_owner(head: Header, model: Any, tokenizer: Any, *, force: bool = False) -> None:
    """Compare the file's model and tokenizer with live ones.

    Raises:
        MismatchError: They differ (I1), unless ``force``, which only warns.
    """
    wrong, odd = _model(head, model), list[str]()
    live = None if tokenizer is None else identity.of_tokenizer(tokenizer)
    if live is not None and head.tokenizer is not None:
        errors, odd = identity.tokenizer_differences(head.tokenizer, live)
        wrong += errors
    if wrong and not force:
        raise MismatchError(wrong)
    for text in (*wrong, *odd):
        warnings.warn(text, UserWarning, stacklevel=3)


def _model(head: Header, model: Any) -> list[str]:
    if model is None:
        return []
    live, ropes = identity.of_model(model)
    if head.model is not None:
        found = identity.differences(head.model, head.ropes, live, ropes)
        if found:
            return found
    return [] if is_basis(head) else shape.differences(head, model)


class _Progress:
    """Counts the stored bytes of finished layers."""

    def __init__(self, file: CacheFile, report: Progress | None):
        self._file, self._report, self._done = file, report, 0
        self._total = sum(t.nbytes for t in file.header.tensors.values())

    def layer(self, layer: Layer) -> None:
        if self._report is None:
            return
        stored = self._file.header.tensors
        self._done += sum(stored[name].nbytes for name in _stored(layer))
        self._report(min(self._done, self._total), self._total)


def _stored(layer: Layer) -> set[str]:
    """Names of the stored tensors of a layer, its children left out."""
    return {n for t in layer.tensors.values() for s in t.segments for n in s.parts.values()}


def _layer(file: CacheFile, layer: Layer, at: str, count: _Progress) -> Any:
    loaded: Loaded = {}
    content = KINDS[layer.kind].content
    if content == "codes":
        loaded = _codes(file, layer)
    else:
        loaded = {name: decode(file, layer, name, at) for name in layer.tensors}
        mx.eval(loaded)
    if content == "children":
        loaded["children"] = [
            _layer(file, child, f"{at}.children[{i}]", count)
            for i, child in enumerate(layer.children)
        ]
    cache = make(layer.kind, layer.scalars, loaded)
    if any(not registry.is_lossless(s) for t in layer.tensors.values() for s in t.segments):
        attach(cache, Provenance(file, layer, at))
    count.layer(layer)
    return cache


def _codes(file: CacheFile, layer: Layer) -> Loaded:
    """Codec and parts of each tensor, for a cache that keeps codes: one segment each (L4)."""
    return {n: file.parts(t.segments[0], t.shape) for n, t in layer.tensors.items()}
