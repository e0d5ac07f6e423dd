"""Write the card of a file for a model hub: README.md with metadata, and a picture of its bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import PurePath

from vkv.format.info import Info
from vkv.format.notebook import place
from vkv.format.overview import layer_kinds, tensor_kinds

#: Name of the picture beside the card.
PICTURE = "bytes.svg"
#: Colours of the roles, from the palette of Okabe and Ito.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
#: A repository of a model hub. Paths of the author's machine are not written.
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


def base_model(info: Info) -> str | None:
    """Return the hub id of the model that a file names; ``None`` for a path or no name."""
    name = info.metadata.get("model", "")
    plain = _HUB_ID.fullmatch(name) and not name.startswith(".") and "/." not in name
    return name if plain else None


def card(info: Info) -> str:
    """Return the text of README.md: metadata in YAML, then what the file is and how to load it."""
    return "\n".join([*_metadata(info), *_body(info)]) + "\n"


def picture(info: Info) -> str:
    """Return an SVG: one bar of all bytes, by role, with a legend."""
    roles = sorted(((n, role) for role, n in info.accounting.roles.items() if n), reverse=True)
    parts, x = [], 0.0
    for i, (n, role) in enumerate(roles):
        width = 640 * n / info.size
        colour, y = COLOURS[i % len(COLOURS)], 60 + 20 * i
        label = escape(f"{role}: {n:,} bytes, {n / info.size:.1%}")
        parts.append(f'<rect x="{x:.2f}" y="8" width="{width:.2f}" height="32" fill="{colour}"/>')
        parts.append(f'<rect x="0" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="20" y="{y + 11}">{label}</text>')
        x += width
    height = 60 + 20 * len(roles)
    style = "<style>text{font:13px sans-serif;fill:#767676}</style>"
    size = f'width="640" height="{height}" viewBox="0 0 640 {height}"'
    title = f"<title>{info.size:,} bytes by purpose</title>"
    body = "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{title}{style}{body}</svg>\n'


def _metadata(info: Info) -> Iterator[str]:
    """Yield the YAML lines; texts are JSON strings, which are YAML too."""
    codecs = sorted({kind.codec for kind in tensor_kinds(info.header)})
    yield "---"
    yield "library_name: vkv"
    if model := base_model(info):
        yield f"base_model: {json.dumps(model)}"
    yield "tags:"
    for tag in ("vkv", "kv-cache", "mlx", *codecs):
        yield f"- {json.dumps(tag)}"
    yield "---"


def _body(info: Info) -> Iterator[str]:
    name = PurePath(place(info.path)).name
    head, account = info.header, info.accounting
    tokens = "unknown tokens" if info.tokens is None else f"{info.tokens:,} tokens"
    model = base_model(info) or (head.model.type if head.model else "a model not recorded")
    yield f"# {_code(name)}"
    yield f"\nThe KV cache of {tokens} of {_code(model)}, for mlx-lm.\n"
    yield f"![Bytes by purpose]({PICTURE})\n"
    yield "| | |\n|---|---|"
    yield f"| id | {_code(info.id)} |"
    yield f"| size | {info.size:,} bytes |"
    if account.elements:
        yield f"| rate | {account.bits:.2f} bits per element, ratio to fp16 {account.ratio:.2f} |"
    yield f"| layers | {_code(layer_kinds(head))} |"
    for kind in tensor_kinds(head)[:8]:
        yield f"| {_code(kind.name)} | {_code(str(kind))} |"
    if head.checkpoints:
        counts = ", ".join(f"{c.tokens:,}" for c in head.checkpoints)
        yield f"| checkpoints | after {counts} tokens |"
    for key, count in info.dependencies.items():
        yield f"| depends on | {_code(key)}, {count} tensors |"
    yield "\n## Load it\n\n```python\nimport vkv\nfrom mlx_lm import load\n"
    yield f"{_load(name, info)}```\n"
    yield f"{_code(f'vkv validate {name}')} checks every byte."


def _load(name: str, info: Info) -> str:
    model = json.dumps(base_model(info) or "PATH-OF-THE-MODEL")
    return (
        f"model, tokenizer = load({model})\n"
        f"prompt = vkv.load({json.dumps(name)}, model=model, tokenizer=tokenizer)\n"
        "print(prompt)\n"
    )


def _code(text: str) -> str:
    """Return text of a file as code, so that no part of it is markup."""
    plain = "".join(c if c.isprintable() and c not in "`|" else "?" for c in text[:200])
    return f"`{plain}`"
