"""Three functions of ``vkv`` share their name with the module they live in."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["convert", "diff", "validate"])
def test_importing_the_module_first_does_not_hide_the_function(name):
    code = f"import vkv, vkv.{name}; from vkv.{name} import {name}; assert vkv.{name} is {name}"
    subprocess.run([sys.executable, "-c", code], check=True)
