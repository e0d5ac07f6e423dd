"""``python -m vkv_cli``: the same as ``vkv``."""

import sys

from vkv_cli.main import main

sys.exit(main())
