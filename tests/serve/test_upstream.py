"""The flags and names of mlx_lm.server that vkv stands on are those of the installed release."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version

import pytest
from vkv_cli.commands.serve import serve

from vkv.errors import UnsupportedError, VkvError
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


def test_a_release_that_lacks_an_attribute_is_refused(monkeypatch):
    from mlx_lm import server

    def construct(self):
        self.requests = None

    monkeypatch.setattr(server.ResponseGenerator, "__init__", construct)
    with pytest.raises(UnsupportedError, match=r"ResponseGenerator\(\)\._generation_thread; "):
        upstream.check()


def test_the_attributes_of_a_request_are_those_that_mlx_lm_sets():
    """What ``do_POST`` takes from a body is what ``settings`` gives, and nothing less."""
    import dis

    from mlx_lm.server import APIHandler, CompletionRequest

    from vkv.serve.completion import ModelLimits, content, parse, settings

    body = parse(b'{"messages": [{"role": "user"}]}', chat=True)
    given = settings(body, ModelLimits(259, 4096, False), upstream.arguments(model="m"))
    taken = {i.argval for i in dis.get_instructions(APIHandler.do_POST) if i.opname == "STORE_ATTR"}
    assert given.keys() == taken - {"body"}
    assert content(body).keys() == CompletionRequest.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"prefill_step_size": 0}, "--prefill-step-size is 0, expected 1 to "),
        ({"prompt_concurrency": 0}, "--prompt-concurrency is 0, expected 1 to "),
        ({"max_tokens": 0}, "--max-tokens is 0, expected 1 to "),
        ({"top_p": 5.0}, "--top-p is 5.0, expected 0.0 to 1.0"),
        ({"temp": -1.0}, "--temp is -1.0, expected 0.0 to 100.0"),
        ({"temp": float("nan")}, "--temp is nan, expected 0.0 to 100.0"),
        ({"kv_group_size": 48}, r"--kv-group-size is 48, expected one of \(32, 64, 128\)"),
    ],
)
def test_flags_out_of_range(flags, words):
    with pytest.raises(VkvError, match=words):
        upstream.arguments(model="m", **flags)


def test_unknown_arguments():
    with pytest.raises(TypeError, match="has no 'modle'"):
        upstream.arguments(modle="m")
