"""List the flags of a server, with their defaults and ranges."""

from __future__ import annotations

from typing import Any

from vkv.errors import VkvError

#: Flags of ``mlx_lm.server`` with its defaults. Two are safer here: no page of another
#: origin may read answers (it could find out, token by token, what is stored), and there
#: are no draft models, whose caches no store holds.
DEFAULTS: dict[str, Any] = {
    "model": None,
    "adapter_path": None,
    "host": "127.0.0.1",
    "port": 8080,
    "allowed_origins": (),
    "draft_model": None,
    "num_draft_tokens": 3,
    "trust_remote_code": False,
    "log_level": "INFO",
    "chat_template": "",
    "use_default_chat_template": False,
    "temp": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 512,
    "chat_template_args": {},
    "decode_concurrency": 32,
    "prompt_concurrency": 8,
    "prefill_step_size": 2048,
    "prompt_cache_size": 10,
    "prompt_cache_bytes": None,
    "kv_bits": None,
    "kv_group_size": 64,
    "quantized_kv_start": 5000,
    "pipeline": False,
}


#: Flags of this server alone, with their defaults.
OWN: dict[str, Any] = {
    "also_serve": (),
    "allowed_hosts": (),
    "allow_image_urls": False,
    "hide_cached_tokens": False,
    "max_context": None,
}
_MOST = 2**31 - 1
#: The least and the largest value of flags that are numbers.
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "temp": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, _MOST),
    "min_p": (0.0, 1.0),
    "max_context": (2, _MOST),
    "max_tokens": (1, _MOST),
    "decode_concurrency": (1, 4096),
    "prompt_concurrency": (1, 4096),
    "prefill_step_size": (1, 1 << 20),
    "prompt_cache_size": (1, 1 << 20),
    "prompt_cache_bytes": (0, 2**63 - 1),
    "quantized_kv_start": (0, _MOST),
}
#: The values of flags that have only a few.
CHOICES: dict[str, tuple[int, ...]] = {
    "kv_bits": (2, 3, 4, 5, 6, 8),
    "kv_group_size": (32, 64, 128),
}


def check_value(name: str, value: Any) -> None:
    """Check the value of one flag, given by its Python name.

    Raises:
        VkvError: If it is out of range.
    """
    flag = "--" + name.replace("_", "-")
    least, most = RANGES.get(name, (value, value))
    if name in RANGES and value is not None and not least <= value <= most:
        raise VkvError(f"{flag} is {value}, expected {least} to {most}")
    if name in CHOICES and value is not None and value not in CHOICES[name]:
        raise VkvError(f"{flag} is {value}, expected one of {CHOICES[name]}")
