"""Run the command line: ``python -m vkv``."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    # The command line is a package of its own, above this one; no module here imports it.
    sys.exit(import_module("vkv_cli.__main__").main())
