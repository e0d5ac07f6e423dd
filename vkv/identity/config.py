"""Record the part of a model's configuration that its cache depends on, as canonical JSON.

Both mlx-lm 0.31 and 0.32 must give the same text for the same model, and so must a
``config.json`` that another tool has saved again. Therefore fields that still have
the default of their class are left out (a new release adds some), but for those
that people ask about; so are fields that no layer reads.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

#: Recorded even at their default, so that a difference names both values.
ALWAYS = frozenset({
    "attention_bias", "head_dim", "hidden_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta",
    "rope_traditional", "tie_word_embeddings", "vocab_size",
})  # fmt: skip
#: Read by no layer at inference, or shown by the form of the weights.
NEVER = frozenset({
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "intermediate_size", "model_file", "pad_token_id", "quantization", "quantization_config",
    "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
_EXACT = 1 << 53


#: Descriptions of modules, and how many have each: of quantization, and of adapters.
ModuleCounts = dict[str, Counter[str]]


def config_texts(
    model: Any, dtypes: set[str], counts: ModuleCounts | None = None
) -> tuple[str, str]:
    """Describe a model in canonical JSON: ``{"args": …, "weights": …}``.

    Args:
        model: Its ``args`` or ``config`` is a dataclass.
        dtypes: Float dtypes of its parameters.
        counts: Of its modules, where ``model`` has only a part of its layers.

    Returns:
        The text that a file records, and the one that the id covers. The first also has
        ``unread``, by dotted path: fields that no layer of this model reads.
    """
    args = getattr(model, "args", None) or getattr(model, "config", None)
    read = _plain(args)
    unread = _take_unread(read) if _ignores_lengths(model, json.dumps(read)) else {}
    covered = {"args": read, "weights": _weights(counts or module_counts(model), dtypes)}
    return canonical(covered | ({"unread": unread} if unread else {})), canonical(covered)


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


#: The length that a model was trained for. Ropes of these classes take it and do not read it.
LENGTH = "max_position_embeddings"
_LENGTH_UNREAD = frozenset({
    "mlx.nn.layers.positional_encoding.RoPE", "mlx_lm.models.rope_utils.Llama3RoPE",
    "mlx_lm.models.rope_utils.ProportionalRoPE", "mlx_lm.models.rope_utils.YarnRoPE",
    "mlx_lm.models.deepseek_v2.DeepseekV2YarnRotaryEmbedding",
    "mlx_lm.models.hunyuan.DynamicNTKAlphaRoPE",
    "mlx_lm.models.hunyuan_v1_dense.DynamicNTKAlphaRoPE",
})  # fmt: skip
_POSITIONS = re.compile("rope|rotary|position|ntk|alibi", re.IGNORECASE)


def _ignores_lengths(model: Any, text: str) -> bool:
    """Tell whether all that knows positions in ``model`` is known not to read ``LENGTH``.

    YaRN reads it where its own original length is not set.
    """
    names = {f"{type(m).__module__}.{type(m).__qualname__}" for _, m in model.named_modules()}
    knowing = {name for name in names if _POSITIONS.search(name.rpartition(".")[2])}
    yarn = any(name.endswith(".YarnRoPE") for name in knowing)
    return knowing <= _LENGTH_UNREAD and not (yarn and f"original_{LENGTH}" not in text)


def _take_unread(value: Any, path: str = "") -> dict[str, Any]:
    """Remove ``LENGTH`` at any depth of maps; return what was removed, by dotted path."""
    if not isinstance(value, dict):
        return {}
    found = {f"{path}{LENGTH}": value.pop(LENGTH)} if LENGTH in value else {}
    for name, item in value.items():
        found |= _take_unread(item, f"{path}{name}.")
    return found


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON data; ``None`` for anything that is no data."""
    if is_dataclass(value):
        return _fields(
            {f.name: getattr(value, f.name) for f in fields(value) if _is_recorded(f, value)}
        )
    if isinstance(value, dict):
        return _fields({str(k): v for k, v in value.items()})
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return _number(value)
    return value if isinstance(value, bool | int | str) else None


def _is_recorded(field: Field[Any], owner: Any) -> bool:
    """Tell whether a field differs from the default of its class, or is always recorded."""
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
    _normalize_ropes(known)
    return known


def _normalize_ropes(known: dict[str, Any]) -> None:
    """Leave out settings of ropes that are proven equal to others that stay.

    ``rope_parameters`` is the newer form, from which many classes take ``rope_theta`` and
    ``rope_scaling``. Other classes read more from it, so it stays unless all it says is said
    beside it.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(known.get(name), dict):
            known[name] = _rope_settings(known[name])
    theta = known.get("rope_theta")
    settings = known.get("rope_scaling")
    if isinstance(settings, dict):
        known["rope_scaling"] = _without_theta(settings, theta)
    newer = known.get("rope_parameters")
    if isinstance(newer, dict) and newer.get("rope_theta") == theta is not None:
        said = _without_theta(newer, theta)
        if said in (known.get("rope_scaling", {}), {}):
            del known["rope_parameters"]
    for name in ("rope_scaling", "rope_parameters"):
        if known.get(name) == {}:
            del known[name]


def _rope_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Rename ``type``, the older name of ``rope_type``, where it says no other thing."""
    settings = dict(settings)
    older = settings.get("type")
    if older is not None and settings.get("rope_type", older) == older:
        settings["rope_type"] = settings.pop("type")
    return {} if settings == {"rope_type": "default"} else settings


def _without_theta(settings: dict[str, Any], theta: Any) -> dict[str, Any]:
    """Leave out a base that is said beside the settings; ``default`` alone says nothing."""
    rest = {k: v for k, v in settings.items() if k != "rope_theta" or v != theta}
    return {} if rest == {"rope_type": "default"} else rest


def _number(value: float) -> float | int | str:
    """Return one form for ``10000`` and ``10000.0``; text for infinities, which JSON lacks."""
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def module_counts(model: Any) -> ModuleCounts:
    """Count the modules of a model, or of one of its layers, that are quantized or adapted."""
    modules = [module for _, module in model.named_modules()]
    return {
        "quantization": Counter(text for text in map(_quantization, modules) if text),
        "adapter": Counter(text for text in map(_adapter, modules) if text),
    }


def _weights(counts: ModuleCounts, dtypes: set[str]) -> dict[str, str]:
    """Describe dtype, quantization and adapters, which the digests of layers do not name."""
    found = {"dtype": ", ".join(sorted(dtypes))}
    found |= {name: _counted(counter) for name, counter in counts.items()}
    return {name: text for name, text in found.items() if text}


def _counted(counter: Counter[str]) -> str:
    """Join equal texts: ``a (28 modules), b (1 module)``."""
    counts = sorted(counter.items())
    return ", ".join(f"{text} ({n} module{'s' if n > 1 else ''})" for text, n in counts)


def _quantization(module: Any) -> str | None:
    bits, group = getattr(module, "bits", None), getattr(module, "group_size", None)
    if not isinstance(bits, int) or not isinstance(group, int):
        return None
    mode = getattr(module, "mode", "affine")
    return f"{bits} bits in groups of {group}" + (f", {mode}" if mode != "affine" else "")


def _adapter(module: Any) -> str | None:
    """Describe a LoRA or DoRA module. Its scale is no parameter, so no digest covers it."""
    if "lora_a" not in module or "lora_b" not in module:
        return None
    rank = min(*module.lora_a.shape[-2:], *module.lora_b.shape[-2:])
    scale = _number(float(getattr(module, "scale", 1.0)))
    return f"{type(module).__name__}, rank {rank}, scale {scale}"
