"""Write a file of caches, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from vkv import identity
from vkv._atomic import replacing
from vkv.caches.checkpoints.record import Checkpoint
from vkv.caches.kinds.adapter import Snapshot
from vkv.caches.loading.compatibility import differences
from vkv.caches.saving.checkpoints import encoded_checkpoints
from vkv.caches.saving.contents import FileContents, Pending, file_contents
from vkv.caches.saving.encode import encode_layer
from vkv.caches.saving.rate_plan import plan_layers
from vkv.caches.saving.request import Progress, SaveRequest
from vkv.codecs.segment_check import check_rereads
from vkv.errors import CacheError
from vkv.format import container_write, header
from vkv.format.document import Document
from vkv.format.file_id import from_bytes
from vkv.format.framing import Form
from vkv.format.info import Info, of_document
from vkv.format.layer_rules import check_layers
from vkv.format.schema import Header, Stored, Tokens
from vkv.format.target import check_target
from vkv.identity.heads import check_heads, with_heads
from vkv.sources import base
from vkv.sources.local import FileSource

TOKENS = "vkv.tokens"


def write(
    path: str | os.PathLike[str],
    head: Header,
    request: SaveRequest,
    snapshots: Iterable[Snapshot],
    tokens: Any = None,
    *,
    model: Any = None,
    tables: Mapping[str, mx.array] | None = None,
    checkpoints: Sequence[Checkpoint] = (),
    durable: bool = True,
    progress: Progress | None = None,
) -> Info:
    """Write snapshots under a header that lacks layers, tensors, tables, tokens and ropes.

    The file takes its name only once it opens as a reader would open it.

    Args:
        path: Where to write.
        head: Who made the caches, and metadata.
        request: How tensors are stored.
        snapshots: One per layer of the model.
        tokens: Ids that the caches hold, if they are known.
        model: The live model that ``head.model`` is the identity of, if there is one.
        tables: To be offered to other files, by name.
        checkpoints: Of the caches, in ascending order.
        durable: Flush to the disk before returning.
        progress: Called with (bytes done, bytes in all).
    """
    ids = None if tokens is None else identity.token_bytes(tokens)
    if ids is not None:
        known = list(memoryview(ids).cast("I"))
        checkpoints = [c for c in checkpoints if c.tokens < len(known) and c.fits(known)]
    fixed = _fixed(head, request, ids)
    contents = encoded_contents(request, snapshots, fixed, tables, checkpoints)
    if ids is not None:
        pending = Pending("tokens", "U32", (len(ids) // 4,), lambda: ids)
        contents = replace(contents, tensors={TOKENS: pending, **contents.tensors})
    check_target(path, {from_bytes(x.file) for x in contents.external.values() if x.file})
    head = _completed(head, contents, ids)
    check_layers(head)
    head = _with_heads(head, model)
    with replacing(path, durable=durable) as fd:
        container_write.write(
            fd,
            _counted(contents, progress),
            lambda digests: header.dump(_stored(head, contents, digests)),
        )
        with Document(FileSource(fd), os.fspath(path)) as document:
            check_rereads(document.header)
            return of_document(document)


def _with_heads(head: Header, model: Any) -> Header:
    """Check numbers of KV heads (I7), and record those that a live model has, but its config not.

    A tensor-parallel rank has a part of them, and MLA latents stand in one.
    """
    try:
        check_heads(head)
    except CacheError:
        if model is None or head.model is None or differences(head, model):
            raise
        return header.replace(head, model=with_heads(head.model, head.layers))
    return head


def encoded_contents(
    request: SaveRequest,
    snapshots: Iterable[Snapshot],
    fixed: int = 0,
    tables: Mapping[str, mx.array] | None = None,
    checkpoints: Sequence[Checkpoint] = (),
) -> FileContents:
    """Plan and encode snapshots, layer after layer: all of a save but writing.

    Args:
        request: How tensors are stored.
        snapshots: One per layer of the model.
        fixed: Bytes of the file that are no layer's.
        tables: To be offered to other files, by name.
        checkpoints: Of the caches; raw, where the codec plans for a whole cache.
    """
    plans = plan_layers(request, snapshots, fixed)
    layers = (encode_layer(plan, request.max_segments) for plan in plans)
    return file_contents(request, layers, tables, encoded_checkpoints(request, checkpoints))


def _fixed(head: Header, request: SaveRequest, ids: bytes | None) -> int:
    """Return the bytes of the file that do not depend on its layers."""
    return len(header.dump(header.replace(head, ropes=request.ropes))) + len(ids or b"")


def _completed(head: Header, contents: FileContents, ids: bytes | None) -> Header:
    tokens = None
    if ids is not None:
        digest = container_write.digest(ids)
        tokens = Tokens(count=len(ids) // 4, digest=digest, tensor=TOKENS)
    return header.replace(
        head,
        layers=contents.layers,
        checkpoints=contents.checkpoints,
        ropes=contents.ropes,
        needs=contents.needs,
        tables=dict(contents.tables),
        tokens=tokens,
    )


def _stored(head: Header, contents: FileContents, digests: list[bytes]) -> Header:
    tensors = {
        name: Stored(role=p.role, dtype=p.dtype, shape=p.shape, digest=digest)
        for (name, p), digest in zip(contents.tensors.items(), digests, strict=True)
    }
    return header.replace(head, tensors={**tensors, **contents.external})


def _counted(
    contents: FileContents, progress: Progress | None
) -> list[tuple[Form, Callable[[], base.Buffer | container_write.Pieces]]]:
    """List the tensors in file order; each load tells ``progress`` how far the file is."""
    total = sum(p.nbytes for p in contents.tensors.values())
    done = 0

    def load(pending: Pending) -> base.Buffer | container_write.Pieces:
        nonlocal done
        data = pending.load()
        done += pending.nbytes
        if progress is not None:
            progress(done, total)
        return data

    return [
        ((name, p.dtype, p.shape), lambda p=p: load(p))  # type: ignore[misc]
        for name, p in contents.tensors.items()
    ]
