"""Two ranks over MLX's ring on the loopback interface, started once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.models.tiny import MODELS
from vkv import identity

ROOT = Path(__file__).parents[2]


def ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    numbers = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return numbers


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    hosts = tmp_path_factory.mktemp("ring") / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports(2)]))
    env = os.environ | {"MLX_HOSTFILE": str(hosts)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.over_ring"],
            cwd=ROOT, env=env | {"MLX_RANK": str(rank)}, stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [json.loads(output) for output in outputs]


def test_all_ranks_raise_the_error_of_the_one_that_failed(seen):
    for rank in seen:
        assert rank["damaged"] == ["DigestError", "layers.0.keys: the bytes changed [D1]"]
        assert rank["missing"][0] == "FileNotFoundError"
        assert "/no/such/file" in rank["missing"][1]
    assert [rank["after"] for rank in seen] == [0, 1]


def test_ranks_give_any_number_of_bytes(seen):
    assert [rank["gathered"] for rank in seen] == [[0, 20]] * 2


def test_a_sharded_model_has_the_id_of_the_whole_one(seen):
    for way, name in (("tensor", "llama"), ("pipeline", "deepseek_v3")):
        whole = identity.of_model(MODELS[name]())[0].id.hex()
        assert [rank[way] for rank in seen] == [whole] * 2


def test_a_model_split_in_an_unknown_way_is_refused(seen):
    for rank in seen:
        assert "parameter mlp.up_proj.weight differs from rank to rank" in rank["unknown"]
