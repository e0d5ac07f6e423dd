"""Standard streams that are closed, and text that is not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def shell(line: str, *args: object, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``vkv`` in a shell: ``line`` has the redirections, ``$@`` its arguments."""
    return subprocess.run(
        ["sh", "-c", f'"$0" -m vkv {line}', sys.executable, *map(str, args)],
        capture_output=True, check=False, env={**os.environ, **env},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_cost_only_what_they_would_show(saved, tmp_path, closed):
    ran = shell(f'inspect "$1" {closed}', saved)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert (ran.stdout == b"") == (">&-" in closed.split())
    copy = tmp_path / "copy.vkv"
    assert shell(f'convert "$1" "$2" {closed}', saved, copy).returncode == 0
    assert shell('validate "$1"', copy).returncode == 0


def test_a_prompt_from_a_closed_stream_is_missing_not_empty(model, tmp_path):
    line = 'save --model "$1" --system-prompt - -o "$2" <&-'
    ran = shell(line, model, tmp_path / "a.vkv")
    assert ran.returncode == 1
    assert ran.stderr.decode() == (
        "vkv: error: --system-prompt from standard input: standard input is closed, expected text\n"
    )
    assert not (tmp_path / "a.vkv").exists()


LATIN = "caf\xe9".encode("latin-1")


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("--prompt-file", LATIN, "byte 3 is not UTF-8"),
        ("--messages", LATIN, "byte 3 is not UTF-8"),
        ("--messages", b'[{"role":"user","content":"a\\ud800b"}]', "message 0 holds half a"),
    ],
)
def test_files_that_are_not_utf8(run, model, tmp_path, option, text, expected):
    (tmp_path / "in").write_bytes(text)
    ran = run("save", "--model", model, option, tmp_path / "in", "-o", tmp_path / "a.vkv")
    assert ran.status == 1
    assert ran.err.startswith(f"vkv: error: {tmp_path / 'in'}: {expected}")


def test_arguments_that_are_not_utf8(run, model, tmp_path):
    word = os.fsdecode(LATIN)
    ran = run("save", "--model", model, "--prompt", word, "-o", tmp_path / "a.vkv")
    assert (ran.status, ran.err) == (1, "vkv: error: --prompt: byte 3 is not UTF-8\n")


def test_a_byte_order_mark_is_no_part_of_the_prompt(run, model, tmp_path):
    for name, mark in (("a", b""), ("b", b"\xef\xbb\xbf")):
        (tmp_path / "in").write_bytes(mark + b"Hello")
        made = tmp_path / f"{name}.vkv"
        assert (
            run("save", "--model", model, "--prompt-file", tmp_path / "in", "-o", made).status == 0
        )
    assert (tmp_path / "a.vkv").read_bytes() == (tmp_path / "b.vkv").read_bytes()


@pytest.mark.slow
def test_text_is_utf8_whatever_the_locale_says(model, tmp_path):
    line = 'save --model "$1" --system-prompt - -o "$2" < "$3"'
    (tmp_path / "in").write_text("café", encoding="utf-8")
    made = []
    for i, env in enumerate(
        ({}, {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"})
    ):
        path = tmp_path / f"{i}.vkv"
        assert shell(line, model, path, tmp_path / "in", **env).returncode == 0
        made.append(path.read_bytes())
    assert made[0] == made[1] == made[2]
