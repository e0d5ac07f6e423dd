"""Print all that a header says: every layer, and the bytes by role and tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from vkv.format.account import ROWS, Accounting
from vkv.format.info import Info
from vkv.format.layer_summary import LayerGroup, layer_groups
from vkv.format.notebook import place
from vkv_cli import screen, text

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(info: Info) -> None:
    """Print all that is known of one file."""
    screen.show(
        screen.whole(place(info.path)),
        screen.columns((("", name, value) for name, value in _identity(info)), wrap=True),
        "",
        screen.columns(
            (cells for group in layer_groups(info.header.layers) for cells in _layers(group)),
            wrap=True,
        ),
        "",
        *_account(info.accounting),
    )


def _identity(info: Info) -> Iterator[tuple[str, str]]:
    head, printable = info.header, partial(text.printable, limit=200)
    yield "id", info.id
    yield "size", text.exact_size(info.size)
    yield "format", f"{head.version}, written by {printable(head.producer)}"
    if head.created:
        yield "created", printable(head.created)
    if head.needs:
        yield "needs", printable(", ".join(head.needs))
    for key, tensors in info.dependencies.items():
        yield "depends on", f"{key}, {tensors} tensors of it"
    if head.tables:
        yield "tables", f"{len(head.tables)}, for other files"
    yield "model", _model(info)
    yield "tokenizer", _tokenizer(info)
    if head.tokens:
        yield "tokens", f"{head.tokens.count:,}, digest {head.tokens.digest.hex()[:16]}"
    else:
        yield "tokens", "not recorded"
    for checkpoint in info.checkpoints:
        end = ", the end of a message" if checkpoint["message"] else ""
        size = text.size(checkpoint["bytes"])
        yield "checkpoint", f"after {checkpoint['tokens']:,} tokens{end}, {size}"
    if head.checkpoints:
        yield "", "checkpoints come on top of the rate of the codec"
    for key, value in sorted(info.metadata.items()):
        yield "metadata", f"{printable(key)} = {printable(value)}"


def _model(info: Info) -> str:
    model = info.header.model
    if model is None:
        return "not recorded"
    return (
        f"{text.printable(model.type)}, {len(model.layers)} layers, "
        f"{model.parameters:,} parameters, id {model.id.hex()[:16]}"
    )


def _tokenizer(info: Info) -> str:
    tokenizer = info.header.tokenizer
    if tokenizer is None:
        return "not recorded"
    template = tokenizer.template.hex()[:16] if tokenizer.template else "none"
    return (
        f"{tokenizer.vocab_size:,} entries, id {tokenizer.id.hex()[:16]}, chat template {template}"
    )


def _layers(group: LayerGroup) -> Iterator[tuple[str, str]]:
    """Return the lines of a run of equal layers: the caches, then each tensor."""
    scalars = sorted(group.scalars.items(), key=lambda item: (item[0] != "offset", item[0]))
    kind = ", ".join([group.kind, *(f"{name} {value}" for name, value in scalars)])
    yield f"layer{'s' * ('-' in group.layers)} {group.layers}", kind
    width = max(map(len, group.tensors), default=0)
    for tensor, form in group.tensors.items():
        yield "", f"{tensor:<{width}}  {form}"
        if tensor in group.notes:
            yield "", f"{'':<{width}}  {group.notes[tensor]}"


def _account(account: Accounting) -> Iterator[RenderableType]:
    """Return the table of bytes by role, in all and for each tensor, and the rates."""
    groups = account.groups
    table = [("bytes", "all", *groups)]
    for role in ROWS:
        if not account.roles[role]:
            continue
        own = [g.roles.get(role, 0) for g in groups.values()]
        table.append((role, f"{account.roles[role]:,}", *(f"{n:,}" if n else "" for n in own)))
    table.append(("total", f"{account.size:,}", *(f"{g.bytes:,}" for g in groups.values())))
    bits = [account.bits, *(g.bits for g in groups.values())]
    table.append(("bits per element", *(f"{x:.3f}" for x in bits)))
    table.append(("ratio to fp16", *(f"{16 / x:.2f}" if x else "" for x in bits)))
    yield screen.columns(table, right=range(1, len(table[0])), wrap=True)
    if account.shared:
        whose = "shared between tensors" if account.elements else "for other files"
        yield f'{account.shared:,} bytes are {whose} and count under "all" alone'
    if account.external:
        yield f"{account.external:,} bytes are in files it depends on, and not counted here"
    if account.adds_up:
        yield f"the parts add up to the size of the file, to the byte: {account.size:,}"
    else:
        total = sum(account.roles.values())
        yield f"the parts add up to {total:,} bytes, but the file has {account.size:,}"
