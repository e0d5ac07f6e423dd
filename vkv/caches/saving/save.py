"""``vkv.save``: live caches to a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import vkv._version
from vkv import identity
from vkv._atomic import replacing
from vkv.arrays.cache_file import open_file
from vkv.caches.kinds import live
from vkv.caches.kinds.adapter import Snapshot
from vkv.caches.saving.basis_file import lent
from vkv.caches.saving.delta import Parent
from vkv.caches.saving.rate_plan import add_layers
from vkv.caches.saving.write_plan import ALL_SEGMENTS, MAX_SEGMENTS, Pending, Plan, Wish
from vkv.codecs import registry
from vkv.codecs.segment_check import check_rereads
from vkv.errors import CacheError, VkvError
from vkv.format import container_write, header
from vkv.format.dependencies import SearchPath
from vkv.format.document import Document, open_document
from vkv.format.info import Info, of_document
from vkv.format.layer_rules import check_layers
from vkv.format.layers import walk
from vkv.format.schema import Header, Stored, Tokens
from vkv.identity.heads import check_heads
from vkv.sources import base
from vkv.sources.local import FileSource

#: A codec string, or one for keys and one for values.
CodecSpec = str | Mapping[str, str]
#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]

TOKENS = "vkv.tokens"


def save(
    path: str | os.PathLike[str],
    cache: Sequence[Any],
    *,
    tokens: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    codec: CodecSpec = "raw",
    metadata: Mapping[str, str] | None = None,
    created: str | None = None,
    reencode: bool = False,
    parent: str | os.PathLike[str] | None = None,
    search_paths: Iterable[SearchPath] | None = None,
    basis: SearchPath | None = None,
    durable: bool = True,
    progress: Progress | None = None,
) -> Info:
    """Write a prompt cache to a file, whole or not at all.

    Tokens that came from a lossy file keep the codes they had there, whatever
    ``codec`` says; only new ones are encoded. Two saves of the same cache with
    the same options give the same bytes.

    Args:
        path: Where to write; an existing file is replaced in one step.
        cache: One mlx-lm cache per layer, as ``make_prompt_cache`` gives.
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
        parent: A file that this cache grew from, and not ``path``. What it holds of the
            leading tokens both share is referred to by its id, not written again: the new
            file cannot be read without it. Codes of ``codec`` are taken as they are there,
            raw rows where they are equal bit for bit. ``Info.dependencies`` says what it came to.
        search_paths: Where the files ``parent`` itself depends on are looked for; its own
            folder if not given.
        basis: A file of ``vkv.train_basis``, for codec ``tc``: the new file holds no axes
            of its own and cannot be read without it.
        durable: Flush to the disk before returning.
        progress: Called with (bytes done, bytes in all).

    Returns:
        What was written, as ``vkv.inspect`` tells it.

    Raises:
        MismatchError: ``parent`` or ``basis`` belongs to another model (I1).
        CacheError: A cache is of an unknown class (L1), holds what no file can
            (L2), or holds another number of tokens than given (L6); or there are
            more or fewer than the model takes (L7); or ``path`` is a file that the new
            one would stand on (L10).
        CodecError, UnknownCodecError: ``codec`` is refused.
        OSError: The file cannot be written; what stood there is untouched.
    """
    snapshots = [_take(c, i) for i, c in enumerate(cache)]
    found, ropes = identity.of_model(model) if model is not None else (None, ())
    if found is not None and len(cache) != len(found.ropes):
        raise CacheError(f"{len(cache)} caches, the model takes {len(found.ropes)}", rule="L7")
    plan = Plan(wish(codec), list(ropes), found.ropes if found else (), reencode)
    plan.most_segments = min(MAX_SEGMENTS, ALL_SEGMENTS // (2 * max(1, len(cache))))
    head = Header(
        version=header.VERSION,
        producer=f"vkv {vkv._version.__version__}",
        created=created,
        model=found,
        tokenizer=identity.of_tokenizer(tokenizer) if tokenizer is not None else None,
        layers=(),
        tensors={},
        metadata=header.metadata(metadata),
    )
    for origin in filter(None, (s.origin for top in snapshots for s in top.walk())):
        plan.know(t for t in origin.file.header.tensors.values() if t.role == "table" and t.file)
    with ExitStack() as stack:
        stack.enter_context(lent(plan, head, basis))
        if parent is not None:
            file = stack.enter_context(open_file(parent, search_paths=search_paths))
            plan.parent = Parent(file, head, tokens)
        return write(path, head, plan, snapshots, tokens, durable=durable, progress=progress)


def wish(codec: CodecSpec) -> Wish:
    """Parse what the caller asked for.

    Raises:
        CodecError, UnknownCodecError: A codec string is refused.
    """
    if isinstance(codec, str):
        choice = registry.parse(codec)
        return Wish(choice, choice)
    if unknown := sorted(codec.keys() - {"keys", "values"}):
        raise VkvError(f"{unknown[0]!r} is not one of 'keys', 'values'", rule="K2", at="codec")
    return Wish(
        registry.parse(codec.get("keys", "raw")), registry.parse(codec.get("values", "raw"))
    )


def write(
    path: str | os.PathLike[str],
    head: Header,
    plan: Plan,
    snapshots: Iterable[Snapshot],
    tokens: Any,
    *,
    durable: bool = True,
    progress: Progress | None = None,
) -> Info:
    """Write snapshots under a header that has all but layers, tensors, tokens and ropes.

    The file takes its name only once it opens as a reader would open it.
    """
    head = _with_tokens(head, plan, tokens)
    add_layers(plan, snapshots, _fixed(head, plan))
    check_target(path, {other.file for other in plan.elsewhere.values() if other.file})
    head = header.replace(
        head, layers=tuple(plan.layers), ropes=tuple(plan.ropes), needs=_needs(plan)
    )
    check_layers(head)
    check_heads(head)
    loads = _counted(plan, progress)
    with replacing(path, durable=durable) as fd:
        container_write.write(fd, loads, lambda digests: header.dump(_stored(head, plan, digests)))
        with Document(FileSource(fd), os.fspath(path)) as document:
            check_rereads(document.header)
            info = of_document(document)
    return info


def check_target(path: str | os.PathLike[str], bases: Iterable[bytes]) -> None:
    """Refuse to replace one of the files that are stood on (L10).

    Args:
        path: Where a file shall be written.
        bases: Ids of the files.
    """
    ids = {key.hex() for key in bases}
    if not ids or not os.path.isfile(path):
        return
    try:
        with open_document(path) as document:
            there = document.id
    except VkvError:
        return  # no vkv file
    if there in ids:
        raise CacheError(
            "a file would be left that stands on the one replaced here; write to another name",
            rule="L10",
            at=os.fspath(path),
        )


def _take(cache: Any, index: int) -> Snapshot:
    try:
        return live.snapshot(cache)
    except VkvError as exc:
        raise exc.within(f"layers[{index}]") from None


def _with_tokens(head: Header, plan: Plan, tokens: Any) -> Header:
    if tokens is None:
        return head
    data = identity.token_bytes(tokens)
    count = len(data) // 4
    plan.tensors[TOKENS] = Pending("tokens", "U32", (count,), lambda: data)
    return header.replace(
        head, tokens=Tokens(count=count, digest=container_write.digest(data), tensor=TOKENS)
    )


def _fixed(head: Header, plan: Plan) -> int:
    """Bytes of the file that do not depend on its layers."""
    bare = header.dump(header.replace(head, tokens=None, ropes=tuple(plan.ropes)))
    return len(bare) + sum(p.nbytes for p in plan.tensors.values())


def _needs(plan: Plan) -> tuple[str, ...]:
    rotated = any(
        segment.rope is not None
        for _, layer in walk(tuple(plan.layers))
        for tensor in layer.tensors.values()
        for segment in tensor.segments
    )
    return (*(["files"] if plan.elsewhere else []), *(["rope"] if rotated else []))


def _stored(head: Header, plan: Plan, digests: list[bytes]) -> Header:
    tensors = {
        name: Stored(role=p.role, dtype=p.dtype, shape=p.shape, digest=digest)
        for (name, p), digest in zip(plan.tensors.items(), digests, strict=True)
    }
    return header.replace(head, tensors=tensors | plan.elsewhere)


def _counted(
    plan: Plan, progress: Progress | None
) -> list[tuple[container_write.Form, Callable[[], base.Buffer | container_write.Pieces]]]:
    """The tensors in file order; each load tells ``progress`` how far the file is."""
    total = sum(p.nbytes for p in plan.tensors.values())
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
        for name, p in plan.tensors.items()
    ]
