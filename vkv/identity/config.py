"""The part of a model's configuration that its cache depends on, as canonical JSON.

Both mlx-lm 0.31 and 0.32 must give the same text for the same model, and so must a
``config.json`` that another tool has saved again. Therefore fields that still have
the default of their class are left out (a new release adds some), but for those
that people ask about; so are fields that no layer reads.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

#: Recorded even at their default, so that a difference names both values.
ALWAYS = frozenset({
    "attention_bias", "head_dim", "hidden_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta",
    "rope_traditional", "tie_word_embeddings", "vocab_size",
})  # fmt: skip
#: Read by no layer at inference, or told by the form of the weights.
NEVER = frozenset({
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "intermediate_size", "model_file", "pad_token_id", "quantization", "quantization_config",
    "router_jitter_noise", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
_EXACT = 1 << 53


def config_text(model: Any, dtypes: set[str]) -> str:
    """``{"args": configuration, "weights": form of the weights}`` as canonical JSON.

    Args:
        model: Its ``args`` or ``config`` is a dataclass.
        dtypes: Float dtypes of its parameters.
    """
    args = getattr(model, "args", None) or getattr(model, "config", None)
    text = {"args": _plain(args), "weights": _weights(model, dtypes)}
    return json.dumps(text, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """JSON of ``value``; ``None`` for what is no data."""
    if is_dataclass(value):
        return _fields({f.name: getattr(value, f.name) for f in fields(value) if _told(f, value)})
    if isinstance(value, dict):
        return _fields({str(k): v for k, v in value.items()})
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return _number(value)
    return value if isinstance(value, bool | int | str) else None


def _told(field: Field[Any], owner: Any) -> bool:
    """Whether a field says more than its class does."""
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return field.name in ALWAYS or bool(getattr(owner, field.name) != default)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    known = {
        name: _plain(value)
        for name, value in values.items()
        if value is not None and name not in NEVER and not name.startswith("_")
    }
    if "rope_theta" in known:
        known.pop("rope_parameters", None)  # a newer form, from which the class took these
        _rope_scaling(known)
    return known


def _rope_scaling(known: dict[str, Any]) -> None:
    """Bring ``rope_scaling`` to one form: ``type`` is its old name for ``rope_type``."""
    scaling = known.pop("rope_scaling", None)
    if not isinstance(scaling, dict):
        return
    scaling = {k: v for k, v in scaling.items() if k not in ("type", "rope_theta")} | {
        "rope_type": scaling.get("type") or scaling.get("rope_type", "default")
    }
    if scaling["rope_type"] != "default":
        known["rope_scaling"] = scaling


def _number(value: float) -> float | int | str:
    """One form for ``10000`` and ``10000.0``; JSON has no infinities."""
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _weights(model: Any, dtypes: set[str]) -> dict[str, str]:
    """In words, what the digests of the layers cannot tell: dtype, quantization, adapter."""
    modules = [module for _, module in model.named_modules()]
    found = {
        "dtype": ", ".join(sorted(dtypes)),
        "quantization": _counted(map(_quantization, modules)),
        "adapter": _counted(map(_adapter, modules)),
    }
    return {name: text for name, text in found.items() if text}


def _counted(texts: Iterable[str | None]) -> str:
    """Join equal texts: ``a (28 modules), b (1 module)``."""
    counts = sorted(Counter(text for text in texts if text).items())
    return ", ".join(f"{text} ({n} module{'s' if n > 1 else ''})" for text, n in counts)


def _quantization(module: Any) -> str | None:
    bits, group = getattr(module, "bits", None), getattr(module, "group_size", None)
    if not isinstance(bits, int) or not isinstance(group, int):
        return None
    mode = getattr(module, "mode", "affine")
    return f"{bits} bits in groups of {group}" + (f", {mode}" if mode != "affine" else "")


def _adapter(module: Any) -> str | None:
    """LoRA, DoRA and their like. ``scale`` is no parameter, so no digest covers it."""
    if "lora_a" not in module or "lora_b" not in module:
        return None
    rank = min(*module.lora_a.shape[-2:], *module.lora_b.shape[-2:])
    scale = _number(float(getattr(module, "scale", 1.0)))
    return f"{type(module).__name__}, rank {rank}, scale {scale}"
