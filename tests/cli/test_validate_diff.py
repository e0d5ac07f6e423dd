"""``vkv validate`` and ``vkv diff``: findings, differences, exit status."""

from __future__ import annotations

import json

import pytest
from mlx_lm.models.cache import KVCache

import vkv
from tests.cli.conftest import filled
from vkv.format.container import HEADER
from vkv.format.document import open_document
from vkv.tools.distance import Distance, total


@pytest.fixture
def damaged(files, tmp_path):
    """A file whose last byte is not what was written."""
    path = tmp_path / "damaged.vkv"
    raw = bytearray((files / "raw.vkv").read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    return path


def test_a_sound_file(run, files):
    path = files / "raw.vkv"
    ran = run("validate", "--deep", path)
    assert (ran.status, ran.err) == (0, "")
    report = vkv.validate(path, deep=True)
    assert ran.out.splitlines() == [*(f"{path}: {f}" for f in report.findings), f"{path}: ok"]


def test_every_finding_is_a_line_and_errors_are_status_1(run, damaged):
    ran = run("validate", damaged)
    assert ran.status == 1
    assert " error: " in ran.out
    assert "the bytes changed [D1]\n" in ran.out
    assert ran.out.endswith(f"{damaged}: 1 error; run `vkv explain D1`\n")


def test_one_bad_file_of_two(run, files, damaged):
    ran = run("validate", damaged, files / "raw.vkv")
    assert ran.status == 1
    assert ran.out.endswith(f"{files / 'raw.vkv'}: ok\n")


def test_json(run, damaged):
    ran = run("validate", "--json", damaged)
    assert ran.status == 1
    assert ran.json == vkv.validate(damaged).to_dict()
    assert ran.json["schema_version"] == 1


def test_against_another_model(run, saved, model, other_model):
    assert run("validate", saved, "--model", model).status == 0
    ran = run("validate", saved, "--model", other_model)
    assert ran.status == 1
    assert "[I1]" in ran.out


def test_diff_of_a_file_with_itself(run, files):
    path = files / "raw.vkv"
    ran = run("diff", path, path)
    assert (ran.status, ran.out, ran.err) == (
        0,
        "no difference\ndigests not checked; `vkv validate` does, and --deep compares values\n",
        "",
    )


def test_diff_shows_both_sides(run, files):
    ran = run("diff", files / "affine.vkv", files / "raw.vkv")
    found = vkv.diff(files / "affine.vkv", files / "raw.vkv")
    assert ran.status == 1
    summary, head, *lines, checked = ran.out.splitlines()
    assert summary == found.summary
    assert head.split() == ["A", "B"]
    assert checked.startswith("digests not checked")
    assert len(lines) == len(found.rows())
    for line, difference in zip(lines, found.rows(), strict=True):
        assert line.split("  ")[0] == difference.at
        assert difference.a in line
        assert line.endswith(difference.b)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_diff_deep_is_a_table_of_layers_the_worst_first(run, files, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    ran = run("diff", "--deep", files / "raw.vkv", files / "affine.vkv")
    found = vkv.diff(files / "raw.vkv", files / "affine.vkv", deep=True)
    assert ran.status == 1
    assert max(map(len, ran.out.splitlines()[1:])) <= width
    head, *rest = ran.out.split("\n\n")[1].splitlines()
    at = next(i for i, line in enumerate(rest) if line.startswith("total "))
    rows, words = rest[:at], " ".join(rest[at + 1 :])
    assert head.split() == ["LAYER", "KEYS", "LARGEST", "VALUES", "LARGEST"]
    assert {row.split()[0] for row in rows} == {d.at for d in found.distances if d.largest}
    worst = [max(float(row.split()[1]), float(row.split()[3])) for row in rows]
    assert worst == sorted(worst, reverse=True)
    assert min(worst) > 0
    assert "; 1 layer the same" in words
    assert words.endswith("digests checked: of every tensor that was decoded")


def test_the_total_of_a_diff_is_that_of_all_values():
    found = [
        Distance("layers[0]", "keys", 0.5, 0.1, 10.0),
        Distance("layers[1]", "keys", 2, 0.4, 30.0),
    ]
    assert total(found) == (2, pytest.approx((0.1 * 10 + 0.4 * 30) / 40))
    assert total([]) == (0.0, 0.0)


def test_diff_as_json(run, files):
    ran = run("diff", "--json", files / "affine.vkv", files / "raw.vkv")
    assert ran.status == 1
    assert json.loads(ran.out) == vkv.diff(files / "affine.vkv", files / "raw.vkv").to_dict()


def test_diff_has_status_2_for_trouble(run, files):
    ran = run("diff", files / "raw.vkv", "none")
    assert (ran.status, ran.err) == (2, "vkv: error: none: No such file or directory\n")


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_json_has_an_object_for_a_file_that_cannot_be_read(run, files, command):
    ran = run(command, "--json", "none", files / "raw.vkv")
    assert ran.status == 1
    error, good = map(json.loads, ran.out.splitlines())
    reason = "none: No such file or directory"
    assert error == {"schema_version": 1, "path": "none", "error": reason}
    assert good["path"] == str(files / "raw.vkv")
    assert ran.err == f"vkv: error: {reason}\n"
    assert run(command, "--json", "none").json == error


def test_findings_come_in_the_order_of_the_file(tmp_path):
    vkv.save(tmp_path / "a.vkv", [filled(KVCache(), tokens=4) for _ in range(12)])
    with open_document(tmp_path / "a.vkv") as document:
        names = [name for name in document.entries if name != HEADER]
        start = document.entries[names[0]].start
    raw = (tmp_path / "a.vkv").read_bytes()
    (tmp_path / "a.vkv").write_bytes(raw[:start] + bytes(b ^ 1 for b in raw[start:]))
    found = [f.at for f in vkv.validate(tmp_path / "a.vkv").findings if f.rule == "D1"]
    assert found == names
    assert len(names) == 24
