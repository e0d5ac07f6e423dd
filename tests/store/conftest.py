"""A store, and a tiny model."""

from __future__ import annotations

import pytest

import vkv
from fixtures.models import tiny


@pytest.fixture(scope="session")
def model():
    return tiny.llama()


@pytest.fixture
def store(tmp_path):
    return vkv.PromptStore(tmp_path / "store")
