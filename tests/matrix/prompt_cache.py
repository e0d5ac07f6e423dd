"""Run mlx-lm's own tests of prompt caches with vkv's two functions in place of its own.

``python -m tests.matrix.prompt_cache FOLDER``: the folder holds mlx-lm's source distribution. Its
tests load a model from a hub; here it is a tiny llama, whose keys and values have the shape
that the tests assume. Prints a line for each test.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_lm.models import cache as caches

import vkv
from fixtures.models import tiny

#: Tests that ask for what a file leaves out on purpose, and what that is.
OTHERWISE = {
    "test_save_load_batch_caches": "batch caches, of which a file holds none (L1)",
    "test_save_load": "the padding of a growing buffer: 256 rows for 10 tokens",
    "test_save_load_quantized_cache": "the same",
    "test_save_load_rotating_cache": "rows of a ring that no later token can see",
}


def tests_of(folder: Path) -> ModuleType:
    """Import mlx-lm's tests, with vkv's functions and a tiny model in place.

    Raises:
        FileNotFoundError: The folder has no such tests.
    """
    path = next(folder.rglob("tests/test_prompt_cache.py"), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no tests/test_prompt_cache.py")
    spec = importlib.util.spec_from_file_location("mlx_lm_test_prompt_cache", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.save_prompt_cache, module.load_prompt_cache = (
        vkv.save_prompt_cache, vkv.load_prompt_cache
    )  # fmt: skip
    module.load = lambda *_: (tiny.llama(head_dim=64), tiny.tokenizer())
    return module  # type: ignore[no-any-return]


def main(folder: Path) -> int:
    """Run the tests, print each with its outcome, and return how many failed."""
    assert caches.save_prompt_cache is not vkv.save_prompt_cache
    suite = unittest.defaultTestLoader.loadTestsFromModule(tests_of(folder))
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    failed = [t.id().rpartition(".")[2] for t, _ in (*result.failures, *result.errors)]
    for name in sorted(OTHERWISE):
        print(f"{name}: may fail, it compares {OTHERWISE[name]}")
    return len(set(failed) - OTHERWISE.keys())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
