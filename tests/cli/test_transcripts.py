"""docs/output.md shows what the commands print."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from tests.helpers import transcripts


def test_the_page_is_what_the_commands_print():
    assert transcripts.PAGE.read_text(encoding="utf-8") == transcripts.page(), (
        "run `python -m tests.helpers.transcripts`"
    )


@pytest.mark.parametrize("width", transcripts.WIDTHS)
@pytest.mark.parametrize("command", ["inspect good/tc-joint.vkv", "codecs", "explain H4"])
def test_no_line_is_wider_than_the_terminal(command, width):
    assert max(map(cell_len, transcripts.printed(command, width).splitlines())) <= width
