"""The program ``vkv``: what is imported here is imported where an interrupt is met."""

import sys


def main() -> int:
    """Run the command line of the process; its exit status."""
    try:
        from vkv_cli.main import main as run

        return run()
    except KeyboardInterrupt:  # also while Python imports, the first tenths of a second
        return 130


if __name__ == "__main__":
    sys.exit(main())
