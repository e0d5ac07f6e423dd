"""Loading a model and its tokenizer with mlx-lm, quietly, with one-line errors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vkv.errors import VkvError
from vkv_cli import quiet
from vkv_cli.progress import progress


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The flags that name a model, as mlx-lm has them.

    Attributes:
        model: A local directory, or a repository on the hub.
        adapter_path: LoRA weights and their config.
        trust_remote_code: Let the tokenizer run code of the repository.
        eos_token: Replaces the tokenizer's end-of-sequence token.
    """

    model: str | None
    adapter_path: str | None
    trust_remote_code: bool
    eos_token: str | None

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        return config if self.eos_token is None else config | {"eos_token": self.eos_token}

    def metadata(self) -> dict[str, str]:
        """What ``mlx_lm.cache_prompt`` writes, and the adapter, if there is one."""
        found = {"model": self.model or "", "tokenizer_config": json.dumps(self.tokenizer_config)}
        return found if self.adapter_path is None else found | {"adapter_path": self.adapter_path}

    def completed(self, metadata: Mapping[str, str]) -> ModelChoice:
        """Fill in from a file what the flags leave open.

        Leave to run code is never taken from a file.

        Raises:
            VkvError: Neither flags nor file name a model.
        """
        eos = self.eos_token or _eos_token(metadata.get("tokenizer_config", "{}"))
        if self.model is not None:
            return replace(self, eos_token=eos)
        if not metadata.get("model"):
            raise VkvError("the file does not name its model: give --model")
        adapter = self.adapter_path or metadata.get("adapter_path")
        return replace(self, model=metadata["model"], adapter_path=adapter, eos_token=eos)


def _eos_token(tokenizer_config: str) -> str | None:
    try:
        found = json.loads(tokenizer_config).get("eos_token")
    except (ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def load_model(choice: ModelChoice) -> tuple[Any, Any]:
    """The model and its tokenizer.

    Raises:
        VkvError: mlx-lm cannot load it, for whatever reason.
    """
    quiet.silence_libraries()
    from mlx_lm import load

    options: dict[str, Any] = {"tokenizer_config": choice.tokenizer_config}
    if choice.adapter_path is not None:
        options["adapter_path"] = choice.adapter_path
    # mlx-lm 0.31 has it for the tokenizer alone.
    if choice.trust_remote_code and "trust_remote_code" in inspect.signature(load).parameters:
        options["trust_remote_code"] = True
    assert choice.model is not None, "options.py or completed() sees to it"
    with progress(f"loading {choice.model}"):
        try:
            model, tokenizer = load(choice.model, **options)[:2]
        except Exception as exc:  # any of mlx-lm, transformers, the hub and the model's own code
            raise cannot_load(choice.model, exc) from exc
    return model, tokenizer


#: What an error of ``huggingface_hub`` means here; its own words fill a paragraph.
_HUB = {
    "HFValidationError": "no such directory",
    "LocalEntryNotFoundError": "no such directory, and the hub cannot be reached",
    "OfflineModeIsEnabled": "no such directory, and the hub is switched off",
    "RepositoryNotFoundError": "no such directory, and no such repository on the hub",
    "GatedRepoError": "its authors ask to be asked: request access on the hub, and log in",
}


def cannot_load(model: str, exc: Exception) -> VkvError:
    """The error to raise for one that mlx-lm raised over ``model``."""
    path = Path(model)
    if path.is_file():
        reason = "it is a file, expected a directory"
    elif path.is_dir() and not (path / "config.json").exists():
        reason = "the directory has no config.json"
    else:
        reason = _HUB.get(type(exc).__name__) or quiet.one_line(exc)
    return VkvError(f"cannot load model {model!r}: {reason}")
