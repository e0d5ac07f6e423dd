"""Describe a file on one screen, and several files in a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vkv.format.account import CHECKPOINTS, Accounting
from vkv.format.info import Info
from vkv.format.notebook import place
from vkv.format.overview import TensorKind, layer_kinds, tensor_kinds
from vkv_cli import screen, text

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Rows of the parts that have no bound, so that the whole is at most 24 lines.
TENSORS, ROLES, NAMED = 4, 5, 3
#: Columns of a terminal that shows bits beside sizes.
WIDE = 80

#: Name, text, size, bits.
Row = tuple[str, str, str, str]


def show(info: Info, prompt: str | None = None) -> None:
    """Print one file in at most 24 lines.

    Args:
        info: The file.
        prompt: How its prompt begins, in words.
    """
    screen.show(*parts(info, prompt))


def parts(info: Info, prompt: str | None = None) -> list[RenderableType]:
    """Return what is printed of one file."""
    about = [(name, value) for name, value in _identity(info, prompt) if value]
    holds = [("layers", layer_kinds(info.header) or "none", "", ""), *_tensors(info)]
    names = max(len(name) for name, *_ in (*about, *holds))
    return [
        screen.whole(place(info.path)),
        screen.columns(_named(about, names), cut=(1,), styles=("dim",)),
        screen.columns(_named(holds, names), cut=(1,), right=(2, 3), styles=("dim",)),
        *(
            screen.columns(_named([note], names), cut=(1,), styles=("dim",))
            for note in _notes(info)
        ),
        "",
        _bytes(info.accounting),
    ]


def _named(rows: Iterable[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    return [(f"  {text.printable(name, 30):<{min(width, 30)}}", *rest) for name, *rest in rows]


def table(infos: list[Info]) -> list[RenderableType]:
    """Return a table of several files, and their total."""
    rows = [("FILE", "SIZE", "BITS", "TOKENS", "CODEC", "MODEL")]
    for info in infos:
        tokens = "–" if info.tokens is None else f"{info.tokens:,}"
        bits = f"{info.accounting.bits:.2f}" if info.accounting.elements else "–"
        own = (text.size(info.size), bits, tokens, _codecs(info), _model_name(info))
        rows.append((place(info.path), *own))
    count = f"{len(infos)} file{'s' * (len(infos) != 1)}"
    total = f"{count}, {text.size(sum(info.size for info in infos))}"
    return [screen.columns(rows, header=True, right=(1, 2, 3), cut=(-1, 4, 5)), total]


def _identity(info: Info, prompt: str | None) -> Iterator[tuple[str, str]]:
    head, account = info.header, info.accounting
    yield "id", info.id
    yield "size", text.exact_size(info.size)
    if account.elements:
        yield "rate", f"{account.bits:.2f} bits per element, ratio to fp16 {account.ratio:.2f}"
    when = f", {head.created}" if head.created else ""
    yield "written", f"by {head.producer}, format {head.version}{when}"
    yield "model", _model(info)
    digest = f", digest {head.tokens.digest.hex()[:12]}" if head.tokens else ""
    yield "tokens", "not recorded" if info.tokens is None else f"{info.tokens:,}{digest}"
    yield "prompt", prompt or ""
    yield "depends on", _dependencies(info)
    yield "tables", f"{len(head.tables)}, for other files" if head.tables else ""
    if head.checkpoints:
        counts = _some([f"{c.tokens:,}" for c in head.checkpoints], 8)
        size = text.size(account.groups[CHECKPOINTS].bytes)
        yield "checkpoints", f"after {counts} tokens, {size}"
    yield "metadata", _metadata(info)
    yield "digests", "not checked; `vkv validate` does"


def _model(info: Info) -> str:
    head = info.header
    if head.model is None:
        return "not recorded"
    parts = [label] if (label := _label(info)) else []
    parts += [head.model.type, f"{_short(head.model.parameters)} parameters"]
    parts.append(f"id {head.model.id.hex()[:12]}")
    if head.tokenizer is None:
        parts.append("tokenizer not recorded")
    return ", ".join(parts)


def _model_name(info: Info) -> str:
    return _label(info) or (info.header.model.type if info.header.model else "–")


def _label(info: Info) -> str:
    """Return the last part of the name that the file has for its model."""
    return info.metadata.get("model", "").rstrip("/").rpartition("/")[2]


def _short(count: int) -> str:
    """Return ``134515008`` as ``135M``."""
    value, units = float(count), ["", "k", "M", "B", "T"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{count}" if count < 1000 else f"{value:.3g}{units[0]}"


def _dependencies(info: Info) -> str:
    found = [f"{key[:12]} ({n} tensor{'s' * (n != 1)})" for key, n in info.dependencies.items()]
    size = text.size(info.accounting.external)
    return f"{_some(found, NAMED)}, {size} there" if found else ""


def _metadata(info: Info) -> str:
    known = {"model"} if info.header.model else set()
    rest = [f"{key}={value}" for key, value in sorted(info.metadata.items()) if key not in known]
    return _some([text.printable(x, 60) for x in rest], NAMED)


def _some(words: list[str], most: int) -> str:
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def _tensors(info: Info) -> list[Row]:
    """Return a row for each kind of tensor; numbered tensors that are alike share one."""
    kinds = tensor_kinds(info.header)
    alike: dict[str, list[TensorKind]] = {}
    for kind in kinds:
        alike.setdefault(f"{kind} {'' if kind.name.isdecimal() else kind.name}", []).append(kind)
    once = {k.name for k in kinds if sum(other.name == k.name for other in kinds) == 1}
    rows = [_tensor(info.accounting, own, once) for own in alike.values()]
    if len(rows) > TENSORS:
        more = f"{len(rows) - TENSORS + 1} more, with --layers"
        rows = [*rows[: TENSORS - 1], ("", more, "", "")]
    return rows


def _tensor(account: Accounting, kinds: list[TensorKind], once: set[str]) -> Row:
    """Return name, codec, size and bits; no size where a name has several codecs."""
    names = sorted((k.name for k in kinds), key=lambda n: (len(n), n))
    name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    if not once.issuperset(names):
        return name, str(kinds[0]), "", ""
    groups = [account.groups[n] for n in names if n in account.groups]
    size, elements = sum(g.bytes for g in groups), sum(g.elements for g in groups)
    bits = f"{8 * size / elements:.2f} bits" if elements and screen.width() >= WIDE else ""
    return name, str(kinds[0]), text.size(size), bits


def _notes(info: Info) -> list[tuple[str, str]]:
    notes = sorted({note for kind in tensor_kinds(info.header) for note in kind.notes})
    return [("note", _some(notes, 1))] if notes else []


def _codecs(info: Info) -> str:
    names = dict.fromkeys(k.rate for k in tensor_kinds(info.header))
    return " / ".join(names) or "–"


def _bytes(account: Accounting) -> RenderableType:
    """Return the bytes by role, the largest first, with shares and bars."""
    roles = sorted(((n, role) for role, n in account.roles.items() if n), reverse=True)
    if len(roles) > ROLES:
        rest = roles[ROLES - 1 :]
        names = ", ".join(role for _, role in rest)
        roles = [*roles[: ROLES - 1], (sum(n for n, _ in rest), names)]
    room = max(4, min(screen.BAR, screen.width() - 36))
    rows = [
        (f"  {role}", f"{n:,}", f"{n / account.size:.1%}", screen.bar(n / account.size, room))
        for n, role in roles
    ]
    return screen.columns(rows, right=(1, 2), cut=(0,), styles=("dim", "", "", "bar"))
