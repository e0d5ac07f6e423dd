"""``vkv.save``: live caches to a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import vkv._version
from vkv import identity
from vkv.arrays.cache_file import open_file
from vkv.caches.checkpoints.cap import cache_bytes, within
from vkv.caches.checkpoints.record import Checkpoint, checkpoints_of
from vkv.caches.kinds import live
from vkv.caches.kinds.adapter import Snapshot
from vkv.caches.position_deltas import position_deltas
from vkv.caches.prompt import Prompt
from vkv.caches.provenance import OpenFiles, Provenance, reopened
from vkv.caches.saving.arguments import caches_and_tokens
from vkv.caches.saving.basis_file import attached
from vkv.caches.saving.delta import ParentFile
from vkv.caches.saving.request import (
    CodecSpec,
    Progress,
    SaveRequest,
    codec_pair,
    max_segments,
)
from vkv.caches.saving.write import write
from vkv.errors import CacheError, VkvError
from vkv.format import header
from vkv.format.dependencies import SearchPath
from vkv.format.info import Info
from vkv.format.layers import external_references
from vkv.format.schema import Header, Stored
from vkv.format.target import check_target
from vkv.sources.urls import check_local


def save(
    path: str | os.PathLike[str],
    cache: Sequence[Any] | Prompt,
    *,
    tokens: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    codec: CodecSpec = "raw",
    metadata: Mapping[str, str] | None = None,
    created: str | None = None,
    reencode: bool = False,
    force: bool = False,
    parent: str | os.PathLike[str] | None = None,
    search_paths: Iterable[SearchPath] | None = None,
    basis: SearchPath | None = None,
    durable: bool = True,
    checkpoints: bool = True,
    checkpoint_share: float | None = None,
    progress: Progress | None = None,
) -> Info:
    """Write a prompt cache to a file, whole or not at all.

    Tokens that came from a lossy file keep the codes they had there, whatever
    ``codec`` says; only new ones are encoded. Two saves of the same cache with
    the same options give the same bytes.

    Args:
        path: Where to write; an existing file is replaced in one step.
        cache: One mlx-lm cache per layer, as ``make_prompt_cache`` gives; or a ``Prompt``, with its
            tokens.
        tokens: The ids the cache holds, in order (list, NumPy or MLX, ``(T,)`` or
            ``(1, T)``). Without them the file cannot be matched to a prompt.
        model: The model that filled the cache. Without it ``load`` cannot refuse
            another model, and keys cannot be rotated back before encoding.
        tokenizer: The tokenizer that made ``tokens``.
        codec: ``"raw"``, ``"affine:bits=4"`` …, or ``{"keys": …, "values": …}``.
        metadata: Text to text, stored as it is.
        created: A time stamp of the caller's; none by default, so that equal
            caches give equal bytes.
        reencode: Encode every token anew, also those that came from a lossy file.
        force: Save also where ``tc`` refuses: header and sinks of a short prompt take more than
            half of the bits asked for, and a cache of little worth would be left.
        parent: A file that this cache grew from, and not ``path``. What it holds of the
            leading tokens both share is referred to by its id, not written again: the new
            file cannot be read without it. Codes of ``codec`` are taken as they are there,
            raw rows where they are equal bit for bit. ``Info.dependencies`` says what it came to.
        search_paths: Where the files ``parent`` itself depends on are looked for; its own
            folder if not given.
        basis: A file of ``vkv.train_basis``, for codec ``tc``: the new file holds no axes
            of its own and cannot be read without it.
        durable: Flush to the disk before returning.
        checkpoints: Also keep the checkpoints that ``cache`` carries (``vkv.prefill``). They
            come on top of the rate of a lossy codec, in its form; raw with ``tc``.
        checkpoint_share: Drop those that cost more than this share of ``cache``, as
            ``vkv.prefill`` does; by default all are kept.
        progress: Called with (bytes done, bytes in all).

    Returns:
        What was written, as ``vkv.inspect`` tells it.

    Raises:
        MismatchError: ``parent`` or ``basis`` belongs to another model (I1).
        CacheError: A cache is of an unknown class (L1), holds what no file can
            (L2), or holds another number of tokens than given (L6); or there are
            more or fewer than the model takes (L7); or ``path`` is a file that the new one,
            or one that ``cache`` was loaded from, depends on (L10).
        CodecError, UnknownCodecError: ``codec`` is refused, or its rate for so short a prompt.
        OSError: The file cannot be written; what stood there is untouched.
    """
    check_local(path)
    cache, tokens = caches_and_tokens(cache, tokens)
    kept = _kept(cache, checkpoint_share) if checkpoints else ()
    snapshots = [_snapshot(c, i) for i, c in enumerate(cache)]
    owner, ropes = identity.of_model(model) if model is not None else (None, ())
    if owner is not None and len(cache) != len(owner.ropes):
        raise CacheError(f"{len(cache)} caches, the model takes {len(owner.ropes)}", rule="L7")
    _check_positions(model)
    head = Header(
        version=header.VERSION,
        producer=f"vkv {vkv._version.__version__}",
        created=created,
        model=owner,
        tokenizer=identity.of_tokenizer(tokenizer) if tokenizer is not None else None,
        layers=(),
        tensors={},
        metadata=header.metadata(metadata),
    )
    request = SaveRequest(
        codecs=codec_pair(codec),
        ropes=tuple(ropes),
        layer_ropes=owner.ropes if owner else (),
        force=force,
        max_segments=max_segments(len(cache)),
    )
    provenances = _provenances([*snapshots, *(s for c in kept for s in c.layers.values())])
    _check_inputs(path, provenances)
    with ExitStack() as stack:
        if not reencode:
            sources = stack.enter_context(reopened(provenances))
            tables = _external_tables(sources)
            request = replace(request, sources=sources, known_tables=tables)
        attachment = attached(basis, request.codecs.both(), owner, ropes)
        request = replace(request, basis=stack.enter_context(attachment))
        if parent is not None:
            file = stack.enter_context(open_file(parent, search_paths=search_paths))
            request = replace(request, parent=ParentFile(file, owner, tokens))
        return write(
            path, head, request, snapshots, tokens, checkpoints=kept,
            model=model, durable=durable, progress=progress,
        )  # fmt: skip


def _check_inputs(path: str | os.PathLike[str], provenances: Iterable[Provenance]) -> None:
    """Refuse to replace a file that one depends on which the caches were loaded from (L10)."""
    if not os.path.isfile(path):
        return
    for loaded in {provenance.file for provenance in provenances}:
        try:
            with loaded.open() as file:
                dependencies = list(external_references(file.header))
        except (VkvError, OSError):
            continue  # nothing can be read from it any more
        check_target(path, dependencies)


def _kept(caches: Sequence[Any], share: float | None) -> tuple[Checkpoint, ...]:
    return within(checkpoints_of(caches), share, 0 if share is None else cache_bytes(caches))


def _check_positions(model: Any) -> None:
    """Refuse caches whose positions the model counts otherwise than tokens (L11)."""
    for path, values in position_deltas(model).items():
        raise CacheError(
            f"model.{path} is {values}: positions were shifted by an image, which a file does not "
            "record; only caches of text alone can be saved",
            rule="L11",
        )


def _snapshot(cache: Any, index: int) -> Snapshot:
    try:
        return live.snapshot(cache)
    except VkvError as exc:
        raise exc.within(f"layers[{index}]") from None


def _provenances(snapshots: Iterable[Snapshot]) -> list[Provenance]:
    layers = [layer for top in snapshots for layer in top.walk()]
    return [layer.provenance for layer in layers if layer.provenance is not None]


def _external_tables(files: OpenFiles) -> tuple[Stored, ...]:
    """Return the tables of third files that the files the caches came from refer to."""
    return tuple(
        t for f in files.values() for t in f.header.tensors.values() if t.role == "table" and t.file
    )
