"""Rewrite what is derived from the code: ``python -m spec``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from spec.rules import rules
from vkv.codecs.registry import CODECS
from vkv.format.schema import Header

HERE = Path(__file__).parent / "v1"
FORMAT = Path(__file__).parents[1] / "vkv" / "format"
TOOLS = FORMAT.parent / "tools"


def schema() -> dict[str, Any]:
    """JSON Schema of the header; byte strings show as base64 text."""
    return msgspec.json.schema(Header)


def registry() -> dict[str, list[int]]:
    """Codec ids and the versions that this package decodes."""
    ids = sorted({codec for codec, _ in CODECS})
    return {codec: sorted(v for c, v in CODECS if c == codec) for codec in ids}


def option_defaults() -> dict[str, Any]:
    """Options of each codec by default, for keys and values of each dtype."""
    return {
        f"{codec}@{version}": {
            tensor: {
                dtype: asdict(cls.configure({}, tensor, dtype)) for dtype in ("BF16", "F16", "F32")
            }
            for tensor in ("keys", "values")
        }
        for (codec, version), cls in sorted(CODECS.items())
    }


def files() -> dict[Path, str]:
    """Path and text of each derived file."""
    rows = ",\n".join(f"  {json.dumps(c)}: {json.dumps(v)}" for c, v in registry().items())
    return {
        HERE / "header.schema.json": json.dumps(schema(), indent=2) + "\n",
        HERE / "registry.json": f"{{\n{rows}\n}}\n",
        TOOLS / "rules.json": json.dumps(rules(), indent=1, ensure_ascii=False) + "\n",
        FORMAT / "option_defaults.json": json.dumps(option_defaults(), indent=1) + "\n",
    }


if __name__ == "__main__":
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path}")
