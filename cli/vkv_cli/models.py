"""Loading a model and its tokenizer with mlx-lm, quietly, with one-line errors."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import vkv
from vkv.caches.prompt import Prompt
from vkv.errors import VkvError
from vkv_cli import quiet
from vkv_cli.progress import progress


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The flags that name a model, as mlx-lm has them.

    Attributes:
        model: A local directory, or a repository on the hub.
        adapter_path: LoRA weights and their config.
        trust_remote_code: Let model and tokenizer run code of the repository.
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
        """Return the metadata that ``mlx_lm.cache_prompt`` writes, and the adapter if any."""
        found = {"model": self.model or "", "tokenizer_config": json.dumps(self.tokenizer_config)}
        return found if self.adapter_path is None else found | {"adapter_path": self.adapter_path}

    def completed(self, metadata: Mapping[str, str]) -> ModelChoice:
        """Fill in from a file what the flags leave open.

        Not the model and its adapter: a model can bring code, and a file may come from
        anyone. They are named, for the caller to say yes to. Nor leave to run code.

        Raises:
            VkvError: No flag names a model; says the file's.
        """
        if self.model is not None:
            eos = self.eos_token or _eos_token(metadata.get("tokenizer_config", "{}"))
            return replace(self, eos_token=eos)
        if not metadata.get("model"):
            raise VkvError("the file does not name its model: give --model")
        names = {"--model": "model", "--adapter-path": "adapter_path"}
        flags = [f"{flag} {quote(metadata[n])}" for flag, n in names.items() if metadata.get(n)]
        raise VkvError(
            "a model is not loaded on the word of a file: if you know the one that this file "
            f"names, pass {' '.join(flags)}"
        )


def _eos_token(tokenizer_config: str) -> str | None:
    try:
        found = json.loads(tokenizer_config).get("eos_token")
    except (ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def load_model(choice: ModelChoice) -> tuple[Any, Any]:
    """Load the model and its tokenizer.

    Raises:
        VkvError: mlx-lm cannot load it, for whatever reason.
    """
    quiet.silence_libraries()
    from mlx_lm import load

    options: dict[str, Any] = {"tokenizer_config": choice.tokenizer_config}
    if choice.adapter_path is not None:
        options["adapter_path"] = choice.adapter_path
    assert choice.model is not None, "options.py or completed() sees to it"
    with progress(f"loading {choice.model}"):
        try:
            if "trust_remote_code" in inspect.signature(load).parameters:
                options["trust_remote_code"] = choice.trust_remote_code
            elif not choice.trust_remote_code:
                _refuse_code(choice.model)
            model, tokenizer = load(choice.model, **options)[:2]
        except Exception as exc:  # any of mlx-lm, transformers, the hub and the model's own code
            raise cannot_load(choice.model, exc) from exc
    return model, tokenizer


def _refuse_code(model: str) -> None:
    """Refuse a model that brings code of its own.

    mlx-lm 0.31 runs the Python file that a model's config names, without asking.
    """
    from mlx_lm import utils

    named = utils.load_config(utils._download(model)).get("model_file")
    if named is not None:
        raise VkvError(f"it runs code of its own, {named!r}: --trust-remote-code allows it")


#: What an error of ``huggingface_hub`` means here; its own words fill a paragraph.
_HUB = {
    "HFValidationError": "no such directory",
    "LocalEntryNotFoundError": "no such directory, and the hub cannot be reached",
    "OfflineModeIsEnabled": "no such directory, and the hub is switched off",
    "RepositoryNotFoundError": "no such directory, and no such repository on the hub",
    "GatedRepoError": "its authors ask to be asked: request access on the hub, and log in",
}


def cannot_load(model: str, exc: Exception) -> VkvError:
    """Return the error to raise for one that mlx-lm raised about ``model``."""
    path = Path(model)
    if path.is_file():
        reason = "it is a file, expected a directory"
    elif path.is_dir() and not (path / "config.json").exists():
        reason = "the directory has no config.json"
    else:
        reason = _HUB.get(type(exc).__name__) or quiet.one_line(exc)
    return VkvError(f"cannot load model {model!r}: {reason}")


def load_prompt(file: str, **options: Any) -> tuple[Prompt, float]:
    """Load the prompt of a file, as ``vkv.load`` does; return it and the seconds it took."""
    start = time.perf_counter()
    with progress(f"reading {file}", unit="bytes") as step:
        try:
            loaded = vkv.load(file, progress=step, **options)
        except VkvError as exc:
            raise exc.of_file(file) from None
    return loaded, time.perf_counter() - start
