"""The flags and names of mlx_lm.server that vkv stands on are those of the installed release."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version

import pytest
from vkv_cli.commands.serve import serve

from vkv.errors import UnsupportedError
from vkv.serve import upstream
from vkv.serve.flags import DEFAULTS, OWN


class ParsedError(Exception):
    pass


@pytest.fixture
def theirs(monkeypatch):
    """mlx_lm.server's flags with their defaults, from its own parser."""
    from mlx_lm import server

    found = {}

    def parse(self, *args):
        found.update(vars(argparse.ArgumentParser.parse_known_args(self, ["--model", "m"])[0]))
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server"])
    with pytest.raises(ParsedError):
        server.main()
    return found


def test_defaults_are_those_of_mlx_lm(theirs):
    ours = {k: v for k, v in vars(upstream.arguments(model="m")).items() if k not in OWN}
    if version("mlx-lm").startswith("0.31."):
        ours = {k: v for k, v in ours.items() if "kv_" not in k}
    assert ours | {"allowed_origins": ["*"]} == theirs


def test_the_command_has_the_same_flags():
    own = {
        "store", "max_bytes", "codec", "keys", "values", "min_tokens", "no_write", "stop_seconds",
    }  # fmt: skip
    without = {"draft_model", "num_draft_tokens", "pipeline"}
    options = {p.name: p for p in serve.params if p.name != "debug"}
    assert options.keys() == (DEFAULTS.keys() - without) | own | OWN.keys()
    values = serve.make_context("serve", ["--model", "m"]).params
    wanted = DEFAULTS | OWN | {"model": "m", "allowed_origins": []}
    assert {k: v for k, v in values.items() if k in wanted} == {
        k: v for k, v in wanted.items() if k not in without
    }


def test_other_releases_are_refused(monkeypatch):
    monkeypatch.setattr(upstream, "version", lambda _: "0.33.1")
    with pytest.raises(UnsupportedError, match=r"^mlx-lm 0\.33\.1; .* works with 0\.31\.3 and 0"):
        upstream.check()


def test_a_release_that_lacks_a_name_is_refused(monkeypatch):
    from mlx_lm.models import cache

    monkeypatch.delattr(cache.LRUPromptCache, "insert_cache")
    with pytest.raises(UnsupportedError, match=r"cache\.LRUPromptCache\.insert_cache; "):
        upstream.check()


def test_unknown_arguments():
    with pytest.raises(TypeError, match="has no 'modle'"):
        upstream.arguments(modle="m")
