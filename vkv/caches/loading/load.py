"""``vkv.load``: a file to live caches."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal, get_args

import mlx.core as mx

from vkv.arrays.cache_file import CacheFile, open_file
from vkv.arrays.deferred import DeferredVerification
from vkv.caches.attention.hook import Route
from vkv.caches.kinds.adapter import Loaded
from vkv.caches.kinds.live import make
from vkv.caches.loading.checkpoints import with_checkpoints
from vkv.caches.loading.decode import decode
from vkv.caches.loading.owner import ModelIdentity, check_owner
from vkv.caches.loading.read_ahead import LayerProgress, ReadAhead
from vkv.caches.packed.notes import planned, unpacked
from vkv.caches.packed.packable import first_packable
from vkv.caches.packed.stored import packed_layer
from vkv.caches.prompt import Prompt
from vkv.caches.provenance import Provenance, attach, loaded_file
from vkv.caches.saving.request import Progress
from vkv.codecs import registry
from vkv.errors import CacheError
from vkv.format.dependencies import SearchPath
from vkv.format.info import of_document
from vkv.format.kinds import KINDS
from vkv.format.layer_rules import check_cache, check_layers
from vkv.format.layers import stored_layers
from vkv.format.schema import Layer
from vkv.identity.heads import check_heads

#: Form of loaded caches: mlx-lm's own classes, or caches that keep the compressed bytes.
LiveForm = Literal["dense", "packed"]


def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    tokenizer: Any = None,
    live: LiveForm = "dense",
    search_paths: Iterable[SearchPath] | None = None,
    basis: SearchPath | None = None,
    at: int | None = None,
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
            depends on; its own folder if not given.
        basis: One more such file: that of ``vkv.train_basis``.
        at: Go back to the nearest usable point at or before so many tokens: the number itself
            where every layer can be cut, else a checkpoint. ``Prompt.tokens``, ``length`` and
            ``notes`` say which it is.
        force: Load in spite of differences, with a warning.
        verify: Check the digest of every tensor that is read.
        progress: Called with (bytes done, bytes in all): the stored bytes of layers and of
            checkpoints.

    Returns:
        The caches, the token ids, and the description of the file.

    Raises:
        MismatchError: The file belongs to another model or tokenizer (I1).
        MissingFileError: It depends on a file that was not found (H12).
        CacheError: There is no usable point at or before ``at`` (L8).
        VkvError: The file is damaged, or needs what this build lacks.
        OSError: It cannot be opened.
    """
    check_live(live)
    more = () if basis is None else (basis,)
    with open_file(path, verify=verify, search_paths=search_paths, more=more) as file:
        return load_file(
            file, model=model, tokenizer=tokenizer, live=live, at=at, force=force,
            progress=progress,
        )  # fmt: skip


def load_file(
    file: CacheFile,
    *,
    model: Any = None,
    tokenizer: Any = None,
    live: LiveForm = "dense",
    known: ModelIdentity | None = None,
    at: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Prompt:
    """Turn an open file into live mlx-lm caches.

    Args:
        file: Not needed by what is returned; the caller closes it.
        known: Identity of ``model``, as ``identity.of_model`` gives it, where the caller
            has computed it.

    All other arguments, and what is returned and raised, as for ``load``.
    """
    check_live(live)
    check_cache(file.header)
    check_layers(file.header)
    if model is None:  # else the caches that it makes say more than its configuration
        check_heads(file.header)
    check_owner(file.header, model, tokenizer, known=known, force=force)
    with DeferredVerification() as deferred:
        count = LayerProgress(file, progress)
        cache = _caches(file, count, deferred, live == "packed")
        cache = with_checkpoints(cache, file, deferred, count.finished)
    notes = _packed_notes(file, cache) if live == "packed" else ()
    prompt = Prompt(cache, file.document.tokens(), of_document(file.document), notes)
    if at is not None and (back := prompt.rewind(at)) != at:
        prompt.notes.append(f"at {back} tokens, the nearest usable point to the {at} asked for")
    return prompt


def _packed_notes(file: CacheFile, cache: list[Any]) -> list[str]:
    codecs = [
        registry.CODECS[segment.codec, segment.version]
        for _, layer in stored_layers(file.header)
        for tensor in layer.tensors.values()
        for segment in tensor.segments
    ]
    return [*unpacked(cache, sizes=True), *planned(codecs)]


def check_live(live: LiveForm) -> None:
    """Refuse what ``live`` of ``load`` cannot be."""
    if live not in get_args(LiveForm):
        raise CacheError(f"live={live!r}, expected one of {get_args(LiveForm)}")


def _caches(
    file: CacheFile, progress: LayerProgress, deferred: DeferredVerification, packed: bool
) -> list[Any]:
    """Make the caches layer by layer, while the next ones are read."""
    caches: list[Any] = []
    ahead, route = ReadAhead(file), Route()
    for i, layer in enumerate(file.header.layers):
        ahead.reach(i)
        at = f"layers[{i}]"
        caches.append(_live(file, layer, at, deferred, route if packed else None))
        progress.finished(layer)
    return caches


def _live(
    file: CacheFile, layer: Layer, at: str, deferred: DeferredVerification, route: Route | None
) -> Any:
    """Make one cache; a packed one where the layer has codes and that was asked for."""
    if route is not None and (codes := packed_layer(file, layer, at, route)) is not None:
        return codes
    loaded: Loaded = {}
    if KINDS[layer.kind].content == "codes":
        loaded = _codes(file, layer)
    else:
        loaded = {name: decode(file, layer, name, at, deferred) for name in layer.tensors}
        mx.eval(loaded)
    if KINDS[layer.kind].content == "children":
        first = first_packable([KINDS[child.kind].packs for child in layer.children])
        loaded["children"] = [
            _live(file, child, f"{at}.children[{i}]", deferred, route if i == first else None)
            for i, child in enumerate(layer.children)
        ]
    cache = make(layer.kind, layer.scalars, loaded)
    lossy = any(not registry.is_lossless(s) for t in layer.tensors.values() for s in t.segments)
    if lossy and (known := loaded_file(file)) is not None:
        attach(cache, Provenance(known, at))
    return cache


def _codes(file: CacheFile, layer: Layer) -> Loaded:
    """Return codec and parts of each tensor, for a cache that keeps codes (one segment, L4)."""
    return {n: file.parts(t.segments[0], t.shape) for n, t in layer.tensors.items()}
