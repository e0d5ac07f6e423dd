"""Hold what every connection of a server needs: its models, by name, and its rules."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vkv.errors import VkvError
from vkv.serve.large import LargeRequests
from vkv.serve.request_error import RequestError

if TYPE_CHECKING:
    from vkv.serve.answers import Client
    from vkv.serve.served_model import ServedModel


@dataclass(frozen=True)
class Rules:
    """Hold what the operator of a server allows.

    Args:
        hosts: Names of this server, for the header ``Host``.
        origins: Pages that may use it, for the header ``Origin``.
        image_urls: Fetch images that a request names by URL.
        hide_cached: Report 0 cached tokens, whatever was stored.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    image_urls: bool = False
    hide_cached: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Rules:
        """Take the rules from the flags of a server."""
        return cls(
            (*args.allowed_hosts, args.host), tuple(args.allowed_origins),
            args.allow_image_urls, args.hide_cached_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class Front:
    """Find models by the names that requests use.

    Args:
        models: The served ones; requests that name none get the first.
        rules: What the operator allows.
        large: Decodes large requests.

    Raises:
        VkvError: If two models have the same name.
    """

    models: Sequence[ServedModel]
    rules: Rules
    large: LargeRequests
    names: dict[str, ServedModel] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.names.update(dict.fromkeys(self.models[0].names, self.models[0]))
        self.names["default_model"] = self.models[0]
        for model in self.models[1:]:
            for name in model.names:
                if self.names.setdefault(name, model) is not model:
                    raise VkvError(f"two served models are named {name!r}, expected one")

    def find(self, name: str | None, adapter: str | None = None) -> ServedModel:
        """Return the model of that name.

        Raises:
            RequestError: Status 404, if no such model is served, or not with that adapter.
        """
        model = self.names.get("default_model" if name is None else name)
        if model is None:
            served = ", ".join(repr(model.names[-1]) for model in self.models)
            raise RequestError(
                f"model {str(name)[:200]!r} is not served; served is {served}",
                "model", status=404, code="model_not_found",
            )  # fmt: skip
        if adapter is not None and adapter != model.cli_args.adapter_path:
            text = f"adapter {adapter[:200]!r} is not served; --adapter-path names the one that is"
            raise RequestError(text, "adapters", status=404, code="adapter_not_found")
        return model

    @property
    def failed(self) -> bool:
        """True if generation from one of the models has ended by faults."""
        return any(model.failed for model in self.models)

    def cancel(self, client: Client, error: Exception) -> None:
        """Cancel the requests of one client."""
        for model in self.models:
            model.cancel(client, error)

    def listing(self, created: int) -> list[dict[str, Any]]:
        """Return the models as the OpenAI API lists them."""
        about = {"object": "model", "created": created, "owned_by": "vkv"}
        return [{"id": name, **about} for name in self.names]
