"""Start-up, the table of commands, and the one place where errors end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest
from mlx_lm.models.cache import KVCache
from vkv_cli import main as entry
from vkv_cli import quiet, screen, text

from vkv import save
from vkv._version import __version__
from vkv.errors import VkvError

HEAVY = ("mlx", "mlx_lm", "transformers", "numpy", "rich", "huggingface_hub", "safetensors",
         "fsspec", "asyncio")  # fmt: skip


def vkv(*args, **options):
    """Run ``vkv`` in a process of its own."""
    command = [sys.executable, "-m", "vkv_cli", *map(str, args)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, check=False, **options)


@pytest.mark.parametrize("args", [["inspect", "{file}"], ["inspect", "--json", "{file}"], ["-h"]])
def test_starts_without_the_heavy_modules(files, args):
    code = (
        "import sys; from vkv_cli.main import main; status = main(sys.argv[2:]);"
        "print([m for m in sys.argv[1].split(',') if m in sys.modules], file=sys.stderr);"
        "sys.exit(status)"
    )
    args = [arg.format(file=files / "affine.vkv") for arg in args]
    tables = args[0] == "inspect" and "--json" not in args
    heavy = [name for name in HEAVY if name != "rich" or not tables]
    command = [sys.executable, "-c", code, ",".join(heavy), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_row_of_the_table_is_a_command(name):
    context = click.Context(entry.cli, info_name="vkv")
    command = entry.cli.get_command(context, name)
    assert command.name == name
    assert command.help
    for param in command.params:
        assert isinstance(param, click.Argument) or param.help, f"{param.name} says what it does"


def test_help_lists_every_command(run):
    out = run("--help").out
    width = max(map(len, entry.COMMANDS))
    for name, (_, line) in entry.COMMANDS.items():
        assert f"  {name:<{width}}  {line}\n" in out


def test_version(run):
    assert run("--version").out == f"vkv {__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'."),
        (["inspect"], "Missing argument 'FILE...'."),
        (["inspect", "--nope", "x"], "No such option"),
        (["diff", "x"], "Missing argument 'B'."),
        (["save", "-o", "x.vkv"], "Missing option '--model'."),
        (["save", "--model", "m"], "Missing option '-o'"),
        (["generate", "x.vkv"], "Missing option '-p' / '--prompt'."),
        (
            ["save", "--model", "m", "-o", "no/where.vkv", "-p", "x"],
            "Invalid value for '-o' / '--output' / '--prompt-cache-file': "
            "directory 'no' does not exist",
        ),
        (
            ["save", "--model", "m", "-o", "/", "-p", "x"],
            "'--prompt-cache-file': '/' is a directory",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv"],
            "no prompt: give --prompt, --prompt-file, --messages or --system-prompt.",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "-p", "a", "--messages", "b"],
            "give one of --prompt, --prompt-file and --messages.",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "--system-prompt", "a", "--messages", "b"],
            "--messages holds the system prompt: leave --system-prompt out.",
        ),
        (
            ["save", "--model", "m", "-o", "x", "--system-prompt", "a", "--ignore-chat-template"],
            "--ignore-chat-template goes with --prompt or --prompt-file.",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "-p", "x", "--meta", "a"],
            "Invalid value for '--meta': 'a' is not key=value",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "-p", "x", "--meta", "a=1", "--meta", "a=2"],
            "Invalid value for '--meta': 'a' is given twice",
        ),
        (
            ["save", "--model", "m", "-o", "x", "--system-prompt", "-", "--prompt-file", "-"],
            "only one of the options that hold the prompt can be stdin",
        ),
        (
            ["generate", "x.vkv", "-p", "x", "-m", "0"],
            "Invalid value for '-m' / '--max-tokens': 0 is neither positive nor -1",
        ),
        (
            ["convert", "a", "b.vkv", "--prompt", "x"],
            "a prompt needs --model, whose tokenizer makes its tokens.",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "-p", "x", "--codec", "zip"],
            "unsupported codec 'zip'; known codecs are ",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "-p", "x", "--values", "affine:bits=7"],
            "affine.bits: 7 is not one of 2, 3, 4, 5, 6, 8 [A1]",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "-p", ""],
            "--prompt is empty: there is nothing to compute",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "--system-prompt", " \n"],
            "--system-prompt is empty: there is nothing to compute",
        ),
        (["save", "--model", "m", "-o", "x", "-p", "x", "--codec", "afine"], "mean 'affine'?"),
        (["convert", "a"], "Missing argument 'OUT|DIR': give it last, or with --output."),
        (["convert", "a", "-o", "s3://b/c"], "s3://… is a URL, which can only be read"),
        (["inspct", "a"], "No such command 'inspct'. Did you mean 'inspect'? See"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_status_2(run, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = run(*args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("vkv: error: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    command = args[0] if args[0] in entry.COMMANDS else ""
    assert ran.err.endswith(f" See `{f'vkv {command}'.strip()} --help`.\n")
    assert os.listdir(tmp_path) == []


def damaged(path, files):
    raw = bytearray((files / "raw.vkv").read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "none.vkv"], "none.vkv: No such file or directory"),
        (["inspect", "."], ".: Is a directory"),
        (["inspect", "empty"], "empty: 0 bytes, expected at least 8 [C1]"),
        (["validate", "none.vkv"], "none.vkv: No such file or directory"),
        (["generate", "none.vkv", "-p", "x"], "none.vkv: No such file or directory"),
        (["convert", "none", "x.vkv"], "none: No such file or directory"),
        (
            ["save", "--model", "m", "-o", "x.vkv", "--prompt-file", "none"],
            "none: No such file or directory",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "--prompt-file", "latin"],
            "latin: byte 3 is not UTF-8",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "--messages", "empty"],
            "empty: not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "--messages", "{}"],
            "{}: expected a JSON list of messages",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "--messages", "[1]"],
            "[1]: message 0 is not a map with role and content",
        ),
        (
            ["save", "--model", "m", "-o", "x.vkv", "--prompt-file", "empty"],
            "empty: an empty prompt: there is nothing to compute",
        ),
        (
            ["save", "--model", ".", "-o", "x.vkv", "-p", "x"],
            "cannot load model '.': the directory has no config.json",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_one_line_and_status_1(run, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for name in ("{}", "[1]"):
        (tmp_path / name).write_text(name)
    ran = run(*args)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"vkv: error: {message}")
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "x.vkv").exists()


@pytest.mark.parametrize("args", [["--debug", "inspect", "none"], ["inspect", "none", "--debug"]])
def test_debug_shows_a_traceback_wherever_it_stands(run, args):
    err = run(*args).err
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("vkv: error: none: No such file or directory\n")


def test_a_fault_is_named_as_one(run, monkeypatch):
    monkeypatch.setattr("vkv.format.info.inspect", lambda _: [][0])
    monkeypatch.setattr("vkv.inspect", lambda _: [][0], raising=False)
    ran = run("inspect", "x")
    assert (ran.status, ran.err) == (
        1,
        "vkv: error: IndexError: list index out of range\n"
        "vkv: this is a fault in vkv; --debug shows where\n",
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, click.Abort])
def test_an_interrupt_is_status_130(run, monkeypatch, error):
    def interrupted(_):
        raise error

    monkeypatch.setattr("vkv.inspect", interrupted, raising=False)
    ran = run("inspect", "x")
    assert (ran.status, ran.out, ran.err.strip()) == (130, "", "")


def test_an_interrupt_while_python_imports_is_status_130():
    code = """if True:
        import runpy, sys
        class Interrupted:
            def find_spec(self, name, *_):
                if name == "click":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupted())
        runpy.run_module("vkv_cli", run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_no_command_shows_the_help(run):
    ran = run()
    assert ran.status == 2
    assert "Commands:" in ran.err


def test_a_reader_that_goes_away_is_no_error(files):
    read, write = os.pipe()
    os.close(read)
    done = vkv("inspect", *[files / "raw.vkv"] * 3, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_output_fits_the_locale(files):
    done = vkv("inspect", "--json", files / "raw.vkv", env=os.environ | {"LC_ALL": "C"})
    assert json.loads(done.stdout)["metadata"]["odd"] == "a\x1b[31m\n"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_995, "10.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1_234_567, "1.23 MB"),
        (4 << 30, "4.29 GB"),
        (10**18, "1000 PB"),
    ],
)
def test_size(count, expected):
    assert text.size(count) == expected


def test_a_long_cell_pads_no_other_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    screen.show(screen.columns([("x" * 400_000, "1"), *(("y", "2"),) * 100], cut=(0,)))
    first, *rest = capsys.readouterr().out.splitlines()
    assert len(first) <= 80
    assert first.split()[0].endswith("…")
    assert len(rest) == 100


WORDS = "\x1b]0;x\x07\x7f\x9b\u202e\u2028😀ä"


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["validate"], ["diff"]])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_words_of_a_file_fit_every_terminal(command, encoding, tmp_path):
    save(tmp_path / "a.vkv", [KVCache()], metadata={WORDS: WORDS})
    save(tmp_path / "b.vkv", [KVCache()])
    paths = [tmp_path / "a.vkv", *[tmp_path / "b.vkv"] * (command == ["diff"])]
    ran = subprocess.run(
        [sys.executable, "-m", "vkv_cli", *command, *paths], capture_output=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (command == ["diff"], b"")
    lines = ran.stdout.decode(encoding).splitlines()
    assert all(line.isprintable() for line in lines)
    if "--json" in command:
        assert json.loads(lines[0])["metadata"] == {WORDS: WORDS}


def test_text_from_a_file_cannot_move_the_cursor():
    assert text.printable("a\x1b[2J\r\nß…\x9b\u202e") == r"a\x1b[2J\r\nß…\x9b\u202e"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError(2, "No such file", "a.vkv"), "a.vkv: No such file"),
        (OSError("disk\nfull"), "disk full"),
        (ValueError(" two\n lines"), "ValueError: two lines"),
        (MemoryError(), "MemoryError"),
        (VkvError("red \x1b[31m\u202e\udcff"), r"red \x1b[31m\u202e\udcff"),
        (VkvError("x" * 5000), "x" * quiet.LONGEST + "… (4,001 characters)"),
    ],
)
def test_one_line(error, expected):
    assert quiet.one_line(error) == expected
