"""Compare the model that a file was made with and a live one, in sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from vkv.errors import HeaderError
from vkv.format.model_config import parse
from vkv.format.schema import Model, Rope, Tokenizer

#: Sentences about the configuration; a file of another architecture has dozens.
MAX_FIELDS = 12
#: Characters shown of a value, which the file chose.
MAX_VALUE = 60
#: Backends differ by some ulps (1e-7) in computed frequencies.
CLOSE = 1e-5

#: Parts of a configuration that are not compared with the others.
APART = (("weights",), ("unread",), ("kv_heads",))

Ropes = Sequence[Rope]
#: Path of names -> value. Names are not joined: many short ones may stand under a long one.
Fields = dict[tuple[str, ...], str]


def differences(stored: Model, stored_ropes: Ropes, live: Model, live_ropes: Ropes) -> list[str]:
    """Return all differences, one sentence each; none if a cache of one is a cache of the other.

    Args:
        stored: Identity in the file.
        stored_ropes: The file's ropes, which ``stored.ropes`` refers to.
        live: Identity of the model at hand.
        live_ropes: Its ropes.
    """
    found = []
    if stored.type != live.type:
        found.append(_both("architecture", stored.type, live.type))
    ours, theirs = _fields(stored.config), _fields(live.config)
    if len(stored.layers) != len(live.layers):
        found.append(f"{len(stored.layers)} layers in the file, {len(live.layers)} in the model")
        for fields in (ours, theirs):
            fields.pop(("args", "num_hidden_layers"), None)
            fields.pop(("args", "layer_types"), None)
    form = _weights(ours, theirs)
    found += _config(ours, theirs) + form + _ropes(stored, stored_ropes, live, live_ropes)
    if stored.parameters != live.parameters:
        if not found:
            found.append(
                f"{stored.parameters} parameters in the file, {live.parameters} in the model"
            )
    elif not form and len(stored.layers) == len(live.layers):
        found += _values(stored, live)
    return found


def unread_differences(stored: Model, live: Model) -> list[str]:
    """Return the differences in fields that no layer reads: none makes another cache."""
    ours, theirs = (
        {path: value for path, value in _fields(model.config).items() if path[0] == "unread"}
        for model in (stored, live)
    )
    return [
        _both(_short(path[-1]), ours[path], theirs[path]) + ", which no layer reads"
        for path in sorted(ours.keys() & theirs.keys())
        if ours[path] != theirs[path]
    ][:MAX_FIELDS]


def _both(name: str, stored: Any, live: Any) -> str:
    return f"{name} is {_short(stored)} in the file, {_short(live)} in the model"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def _fields(config: str) -> Fields:
    """Return a configuration as a flat map; text that is no valid one becomes one field."""
    fields: Fields = {}

    def add(path: tuple[str, ...], value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                add((*path, key), item)
        else:
            fields[path] = value if isinstance(value, str) else json.dumps(value)

    try:
        add((), parse(config))
    except HeaderError:
        return {("args", "config"): config}
    return fields


def _config(stored: Fields, live: Fields) -> list[str]:
    names = sorted(n for n in stored.keys() | live.keys() if n[:1] not in APART)
    wrong = [n for n in names if stored.get(n) != live.get(n)]
    found = [
        _both(_short(_dotted(n)), stored.get(n, "not set"), live.get(n, "not set"))
        for n in wrong[:MAX_FIELDS]
    ]
    if len(wrong) > MAX_FIELDS:
        found.append(f"{len(wrong) - MAX_FIELDS} more fields of the configuration differ")
    return found


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path[1:] if path[:1] == ("args",) else path)


def _weights(stored: Fields, live: Fields) -> list[str]:
    """Return differences in the form of the weights, which make digests incomparable."""
    found = []
    for name, title in (
        ("dtype", "dtype of the weights"),
        ("quantization", "quantization of the weights"),
        ("adapter", "adapter on the weights"),
    ):
        a, b = (fields.get(("weights", name), "none") for fields in (stored, live))
        if a != b:
            found.append(_both(title, a, b))
    return found


def _values(stored: Model, live: Model) -> list[str]:
    """Return which weights of the same form differ."""
    found = []
    wrong = [
        i
        for i, pair in enumerate(zip(stored.layers, live.layers, strict=True))
        if pair[0] != pair[1]
    ]
    if wrong and sorted(stored.layers) == sorted(live.layers):
        moved = "are swapped" if len(wrong) == 2 else "are in another order"
        found.append(f"{_layers(wrong)} {moved}")
    elif wrong:
        found.append(f"weights of {_layers(wrong)} differ")
    if stored.rest != live.rest:
        found.append("weights outside the layers (embeddings, final norm, output head) differ")
    return found


def _ropes(stored: Model, stored_ropes: Ropes, live: Model, live_ropes: Ropes) -> list[str]:
    """Return differences of ropes known to both sides; another release may know more."""
    wrong: dict[str, list[int]] = {}
    for i, (a, b) in enumerate(zip(stored.ropes, live.ropes, strict=False)):
        if a is not None and b is not None:
            for text in _rope(stored_ropes[a], live_ropes[b]):
                wrong.setdefault(text, []).append(i)
    return [f"rotary embedding of {_layers(where)}: {text}" for text, where in wrong.items()]


def _rope(stored: Rope, live: Rope) -> list[str]:
    found = []
    for name in ("dims", "traditional", "base", "scale", "mscale"):
        a, b = getattr(stored, name), getattr(live, name)
        if not _close(a, b):
            found.append(_both(name, _of_rope(a), _of_rope(b)))
    if not found and not _all_close(stored.freqs or (), live.freqs or ()):
        found.append("other frequencies in the file than in the model")
    return found


def _of_rope(value: float | bool | None) -> str:
    if value is None:
        return "a table of frequencies"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _close(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=CLOSE))


def _all_close(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(map(_close, a, b))


def _layers(indices: list[int]) -> str:
    """Return e.g. ``layer 3`` or ``layers 0 to 2 and 5``."""
    spans: list[list[int]] = []
    for i in indices:
        if spans and spans[-1][-1] == i - 1:
            spans[-1].append(i)
        else:
            spans.append([i])
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]} to {s[-1]}" for s in spans]
    joined = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"layer{'s' if len(indices) > 1 else ''} {joined}"


def tokenizer_differences(stored: Tokenizer, live: Tokenizer) -> tuple[list[str], list[str]]:
    """Compare two tokenizers.

    Returns:
        Errors, and warnings: with another chat template the tokens still mean the
        same, only new prompts are laid out otherwise.
    """
    errors, warnings = [], []
    if stored.vocab_size != live.vocab_size:
        errors.append(
            f"vocabulary of {stored.vocab_size} tokens in the file, {live.vocab_size} here"
        )
    elif stored.id != live.id:
        errors.append("the tokenizer has other tokens under the same ids, or other special tokens")
    if stored.template != live.template:
        warnings.append("the chat template is not the one that the file was made with")
    return errors, warnings
