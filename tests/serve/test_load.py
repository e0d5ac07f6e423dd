"""A short run of the load test; ``python -m tests.serve.load`` runs a long one."""

from __future__ import annotations

import pytest

from tests.serve import load


@pytest.mark.slow
@pytest.mark.hostile
def test_well_formed_requests_are_answered_among_hostile_ones(tmp_path):
    result, status, took = load.run(tmp_path, 20, 15)
    assert result.wrong == []
    assert result.right.keys() >= load.KINDS.keys() | {"mistyped"}
    assert (status, took < 5) == (0, True)
    assert "Traceback" not in result.server.log()
