"""``vkv save`` and ``vkv generate``: from a prompt to a file to an answer."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import vkv
from fixtures.models import tiny

SYSTEM = "You keep a lighthouse, and you like to talk about it."
QUESTION = "Is it lit?"


@pytest.fixture(scope="module")
def live(model):
    return mlx_lm.load(str(model))


def text_of(tokenizer, path):
    return tokenizer.decode(vkv.load(path).tokens)


def greedy(live, ids, count):
    """Token ids that the model gives after ``ids`` with a cache of its own."""
    model, tokenizer = live
    responses = mlx_lm.stream_generate(model, tokenizer, list(ids), max_tokens=count)
    return [r.token for r in responses]


@pytest.mark.parametrize(
    ("args", "stdin", "expected"),
    [
        (["--prompt", "Hi"], "", "<|im_start|>user\nHi"),
        (["-p", "-"], "Hi\n", "<|im_start|>user\nHi\n"),
        (["--prompt-file", "hi.txt"], "", "<|im_start|>user\nHi\n"),
        (["--prompt", "Hi", "--ignore-chat-template"], "", "Hi"),
        (
            ["--system-prompt", "Be", "--prompt", "Hi"],
            "",
            "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi",
        ),
        (
            ["--system-prompt", "Be"],
            "",
            "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\n",
        ),
        (
            ["--messages", "talk.json"],
            "",
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_saved(run, model, live, tmp_path, monkeypatch, args, stdin, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hi.txt").write_text("Hi\n")
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    ran = run("save", "--model", model, *args, "-o", "out.vkv", stdin=stdin)
    assert (ran.status, ran.err) == (0, "")
    assert text_of(live[1], "out.vkv") == expected
    assert vkv.validate("out.vkv", deep=True).ok


def test_the_cache_is_the_models(run, model, live, tmp_path):
    path = tmp_path / "a.vkv"
    run("save", "--model", model, "--prompt", "Hello there", "-o", path)
    loaded, cache = vkv.load(path), make_prompt_cache(live[0])
    live[0](mx.array([loaded.tokens]), cache=cache)
    for a, b in zip(loaded.cache, cache, strict=True):
        assert mx.allclose(a.state[0], b.keys[..., : b.offset, :], atol=1e-5)


def test_summary_metadata_and_notes(run, model, tmp_path):
    path = tmp_path / "a.vkv"
    ran = run(
        "save", "--model", model, "--system-prompt", SYSTEM, "-o", path,
        "--codec", "affine:bits=4", "--meta", "by=me", "--meta", "x=a=b", "--eos-token", "z",
    )  # fmt: skip
    info = vkv.inspect(path)
    assert info.metadata == {
        "model": str(model),
        "tokenizer_config": '{"trust_remote_code": false, "eos_token": "z"}',
        "by": "me",
        "x": "a=b",
    }
    first, *notes = ran.out.splitlines()
    account = info.accounting
    assert first == (
        f"{path}: {info.tokens} tokens, {info.size / 1000:.1f} kB ({info.size:,} bytes), "
        f"{account.bits:.2f} bits per element, ratio to fp16 {account.ratio:.2f}"
    )
    assert notes == [f"note: layers {note}" for note in info.notes]
    assert notes, "a head dim of 32 is no multiple of a group of 64"


def test_keys_and_values_have_their_own_codecs(run, model, tmp_path):
    path = tmp_path / "a.vkv"
    args = ["--keys", "affine:bits=8,group=32", "--codec", "affine:bits=4,group=32"]
    ran = run("save", "--model", model, "-p", SYSTEM, "-o", path, *args, "--json")
    assert ran.json == vkv.inspect(path).to_dict()
    bits = {name: text.split(",")[0] for name, text in vkv.inspect(path).codecs.items()}
    assert bits == {"keys": "affine:bits=8", "values": "affine:bits=4"}


def test_an_existing_file_is_replaced_and_keeps_its_mode(run, model, tmp_path):
    path = tmp_path / "a.vkv"
    path.write_text("old")
    path.chmod(0o640)
    assert run("save", "--model", model, "-p", "Hi", "-o", path).status == 0
    assert vkv.inspect(path).tokens
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_max_kv_size(run, model, tmp_path):
    path = tmp_path / "a.vkv"
    deepseek = tiny.save_dir(tiny.deepseek_v2(), tiny.tokenizer(), tmp_path / "deepseek")
    ran = run("save", "--model", deepseek, "-p", "Hi", "-o", path, "--max-kv-size", "8")
    assert (ran.status, ran.err) == (0, "")
    assert vkv.inspect(path).header.layers[0].scalars["max_size"] == 8
    ran = run("save", "--model", model, "-p", "Hi", "-o", path, "--max-kv-size", "8")
    assert (ran.status, ran.err) == (
        0,
        "vkv: warning: this model makes its own caches: --max-kv-size has no effect\n",
    )


def test_kv_bits(run, model, tmp_path):
    path = tmp_path / "a.vkv"
    args = ["save", "--model", model, "-p", "Hi", "-o", path, "--kv-group-size", "32"]
    run(*args, "--kv-bits", "8")
    assert vkv.inspect(path).header.layers[0].kind == "quantized"
    ran = run(*args, "--kv-bits", "7")
    assert ran.status == 1
    assert ran.err.startswith("vkv: error: --kv-bits 7: ")
    assert ran.err.count("\n") == 1


@pytest.fixture
def system_file(run, model, tmp_path):
    path = tmp_path / "system.vkv"
    assert run("save", "--model", model, "--system-prompt", SYSTEM, "-o", path).status == 0
    return path


def test_generate_goes_on_from_the_file(run, model, live, system_file):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    whole = live[1].apply_chat_template(messages, add_generation_prompt=True)
    expected = greedy(live, whole, 12)
    held = vkv.inspect(system_file).tokens
    args = ["generate", system_file, "--model", model, "-m", 12, "--prompt"]
    found = run(*args, QUESTION, "--json").json
    assert found["tokens"] == expected
    assert found["text"] == live[1].decode(expected)
    assert found["prompt_tokens"] == {"reused": held, "computed": len(whole) - held}
    assert (found["schema_version"], found["saved"]) == (1, None)
    ran = run(*args, "-", stdin=QUESTION)
    assert ran.out == found["text"] + "\n"
    reused, generated, first = ran.err.splitlines()
    assert reused == f"Prompt: {held} tokens reused, {len(whole) - held} computed"
    assert generated.startswith("Generation: 12 tokens, ")
    assert first.startswith("Time to first token: ")
    quiet = run(*args, QUESTION, "--verbose", "F")
    assert (quiet.out, quiet.err) == (ran.out, "")


def test_a_grown_cache_is_saved_with_its_tokens_and_goes_on(
    run, model, live, system_file, tmp_path
):  # fmt: skip
    grown = tmp_path / "grown.vkv"
    args = ["--model", model, "-m", 8, "--json", "-p"]
    first = run("generate", system_file, *args, QUESTION, "--save", grown).json
    assert first["saved"] == vkv.inspect(grown).to_dict()
    assert vkv.validate(grown, deep=True).ok
    answer = live[1].decode(first["tokens"])
    assert text_of(live[1], grown) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
        f"<|im_start|>assistant\n{answer}"
    )
    held = vkv.load(grown).tokens
    ended = "" if first["tokens"][-1] in live[1].eos_token_ids else "<|im_end|>"
    turn = f"{ended}\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    rest = live[1].encode(turn, add_special_tokens=False)
    second = run("generate", grown, *args, "Why?").json
    assert second["tokens"] == greedy(live, held + rest, 8)
    assert second["prompt_tokens"] == {"reused": len(held), "computed": len(rest)}


def test_a_grown_lossy_file_keeps_its_codec_and_its_first_bytes(run, model, tmp_path):
    path, grown = tmp_path / "a.vkv", tmp_path / "b.vkv"
    codec = "affine:bits=4,group=32"
    run("save", "--model", model, "--system-prompt", SYSTEM, "-o", path, "--codec", codec)
    run("generate", path, "--model", model, "-p", QUESTION, "-m", 8, "--save", grown)
    assert vkv.inspect(grown).codecs == vkv.inspect(path).codecs
    old, new = vkv.load(path), vkv.load(grown)
    for a, b in zip(old.cache, new.cache, strict=True):
        assert mx.array_equal(a.state[0], b.state[0][..., : a.offset, :])


def test_packed_caches_give_the_same_answer(run, model, tmp_path):
    path = tmp_path / "a.vkv"
    codec = "affine:bits=8,group=32"
    run("save", "--model", model, "--system-prompt", SYSTEM, "-o", path, "--codec", codec)
    args = ["generate", path, "--model", model, "-p", QUESTION, "-m", 8, "--json"]
    dense, packed = (run(*args, "--live", live).json["tokens"] for live in ("dense", "packed"))
    assert dense == packed


def test_a_prompt_without_a_template_goes_on_without_one(run, model, live, tmp_path):
    path = tmp_path / "a.vkv"
    run("save", "--model", model, "-p", "Once upon", "--ignore-chat-template", "-o", path)
    found = run("generate", path, "--model", model, "-p", " a time", "-m", 6, "--json").json
    assert found["tokens"] == greedy(live, live[1].encode("Once upon a time"), 6)


def test_sampling_is_repeatable_with_a_seed(run, model, system_file):
    args = ["generate", system_file, "--model", model, "-p", "x", "-m", 16]
    args += ["--temp", "1", "--top-p", "0.9"]
    one, two, three = (run(*args, "--seed", seed).out for seed in (1, 1, 2))
    assert one == two != three


def test_another_model_is_refused_unless_forced(run, system_file, other_model):
    args = ["generate", system_file, "-p", "x", "-m", 2, "--model", other_model]
    ran = run(*args)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("vkv: error: ")
    assert ran.err.endswith(" [I1]; run `vkv explain I1`\n")
    assert ran.err.count("\n") == 1
    forced = run(*args, "--force", "--verbose", "F")
    assert forced.status == 0
    assert all(line.startswith("vkv: warning: ") for line in forced.err.splitlines())
    assert forced.err


def test_a_file_that_names_no_model(run, files, tmp_path):
    vkv.save(tmp_path / "a.vkv", [KVCache()], tokens=[1])
    ran = run("generate", tmp_path / "a.vkv", "-p", "x")
    assert ran.err == "vkv: error: the file does not name its model: give --model\n"


def test_the_model_that_a_file_names_is_loaded_only_on_the_callers_word(run, tmp_path):
    names = {"model": "some/model of hers", "adapter_path": "a"}
    vkv.save(tmp_path / "a.vkv", [KVCache()], tokens=[1], metadata=names)
    ran = run("generate", tmp_path / "a.vkv", "-p", "x")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == (
        "vkv: error: a model is not loaded on the word of a file: if you know the one that this "
        "file names, pass --model 'some/model of hers' --adapter-path a\n"
    )


def test_code_that_a_model_brings_runs_only_on_the_callers_word(run, tmp_path):
    """mlx-lm 0.31 would run it unasked; 0.32 refuses by itself."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_file": "mine.py"}')
    (tmp_path / "mine.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r}); 1 / 0")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    args = ["save", "--model", tmp_path, "-p", "x", "-o", tmp_path / "a.vkv"]
    ran = run(*args)
    assert ran.status == 1
    assert "mine.py" in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert "division by zero" in run(*args, "--trust-remote-code").err
    assert (tmp_path / "ran").exists()


def test_a_file_without_tokens(run, model, tmp_path):
    run("save", "--model", model, "-p", "x", "-o", tmp_path / "a.vkv")
    vkv.save(tmp_path / "b.vkv", vkv.load(tmp_path / "a.vkv").cache)
    ran = run("generate", tmp_path / "b.vkv", "-p", "x", "--model", model)
    assert ran.err == (
        "vkv: error: the file holds no token ids, so no prompt can go on from it; "
        "`vkv convert --model … --prompt …` adds them [L8]; run `vkv explain L8`\n"
    )


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--messages", '[{"role": "user", "content": "Hello"}]'),
        ("--prompt-file", "Hello"),
        ("--prompt", "Hello"),
        ("--system-prompt", "Hello"),
    ],
)
def test_a_dash_is_stdin(run, model, tmp_path, option, text):
    (tmp_path / "in").write_text(text)
    given = tmp_path / "in" if option in ("--messages", "--prompt-file") else text
    for name, value in (("file", given), ("stdin", "-")):
        out = tmp_path / f"{name}.vkv"
        assert run("save", "--model", model, option, value, "-o", out, stdin=text).status == 0
    assert vkv.diff(tmp_path / "file.vkv", tmp_path / "stdin.vkv").same


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_wrong_usage(run, saved, model, prompt):
    ran = run("generate", saved, "--model", model, "-p", prompt)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("vkv: error: --prompt is empty: there is nothing to compute.")


def test_an_empty_standard_input_is_refused(run, saved, model):
    ran = run("generate", saved, "--model", model, "-p", "-")
    assert (ran.status, ran.out) == (1, "")
    at = "--prompt from standard input"
    assert ran.err == f"vkv: error: {at}: an empty prompt: there is nothing to compute\n"


def saved_chat(run, model, path, *args):
    ran = run("save", "--model", model, "--system-prompt", SYSTEM * 8, "-o", path, *args)
    assert ran.status == 0, ran.err
    return path


def go_on(run, model, path, *args):
    return run("generate", path, "--model", model, "-p", QUESTION, "-m", 4, *args)


def test_an_incremental_file_holds_what_is_new_and_says_what_it_stands_on(run, model, tmp_path):
    chat = saved_chat(run, model, tmp_path / "chat.vkv")
    ran = go_on(run, model, chat, "--save", tmp_path / "turn.vkv", "--incremental")
    assert ran.status == 0, ran.err
    assert "bytes in other files" in ran.err
    assert list(vkv.inspect(tmp_path / "turn.vkv").dependencies) == [vkv.inspect(chat).id]
    ran = go_on(run, model, tmp_path / "turn.vkv", "--save", chat, "--incremental")
    assert ran.status == 1
    assert "[L10]" in ran.err
    assert vkv.validate(tmp_path / "turn.vkv", deep=True).ok


def test_what_must_not_be_replaced_is_said_before_anything_is_computed(run, model, tmp_path):
    chat = saved_chat(run, model, tmp_path / "chat.vkv")
    go_on(run, model, chat, "--save", tmp_path / "turn.vkv", "--incremental")
    for source, target, more in (("turn", "chat", []), ("turn", "turn", ["--incremental"])):
        ran = go_on(run, model, tmp_path / f"{source}.vkv", "--save", tmp_path / f"{target}.vkv",
                    *more)  # fmt: skip
        assert (ran.status, ran.out) == (1, "")
        assert "[L10]" in ran.err
    assert vkv.validate(tmp_path / "turn.vkv", deep=True).ok


def test_an_incremental_file_that_shares_nothing_says_so(run, model, tmp_path):
    chat = saved_chat(run, model, tmp_path / "chat.vkv")
    ran = go_on(run, model, chat, "--save", tmp_path / "b.vkv", "--incremental",
                "--codec", "affine:bits=8,group=32")  # fmt: skip
    assert ran.status == 0, ran.err
    assert "is whole" in ran.err
    assert not vkv.inspect(tmp_path / "b.vkv").dependencies


@pytest.mark.parametrize("args", [["--incremental"], ["--codec", "raw"], ["--meta", "a=b"]])
def test_what_is_for_save_needs_it(run, model, tmp_path, args):
    ran = go_on(run, model, saved_chat(run, model, tmp_path / "chat.vkv"), *args)
    assert ran.status == 2
    assert "--save" in ran.err


def test_trouble_while_loading_names_the_file(run, model, tmp_path):
    chat = saved_chat(run, model, tmp_path / "chat.vkv")
    data = bytearray(chat.read_bytes())
    data[-1] ^= 1
    chat.write_bytes(data)
    ran = go_on(run, model, chat)
    assert ran.status == 1
    assert ran.err.startswith(f"vkv: error: {chat}")


def test_the_answer_is_saved_though_nobody_reads_it(model, run, tmp_path):
    chat = saved_chat(run, model, tmp_path / "chat.vkv")
    code = "import sys; from vkv_cli.main import main; sys.exit(main())"
    args = ["generate", chat, "--model", model, "-p", QUESTION, "-m", "6", "--save",
            tmp_path / "b.vkv"]  # fmt: skip
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], stdout=write, check=False)
    os.close(write)
    assert done.returncode == 0
    assert vkv.inspect(tmp_path / "b.vkv").tokens > vkv.inspect(chat).tokens


def test_generate_says_what_is_not_packed(run, model, tmp_path):
    run("save", "--model", model, "-p", "Once upon", "-o", tmp_path / "a.vkv")
    args = [
        "generate",
        tmp_path / "a.vkv",
        "--model",
        model,
        "-p",
        "x",
        "-m",
        2,
        "--live",
        "packed",
    ]
    text = "layers 0-1 of 2: KVCache is not packed; "
    (note,) = [line for line in run(*args).err.splitlines() if line.startswith("Note: ")]
    assert note.startswith(f"Note: {text}")
    assert run(*args, "--json").json["notes"][0].startswith(text)
    assert run(*args[:-1], "dense", "--json").json["notes"] == []


@pytest.fixture(scope="module")
def ring_model(tmp_path_factory):
    """Directory of a tiny model with sliding windows."""
    made = tiny.MODELS["gemma3_text"]()
    return tiny.save_dir(made, tiny.tokenizer(), tmp_path_factory.mktemp("ring"))


@pytest.fixture
def talk(tmp_path):
    turns = [("system", SYSTEM), ("user", QUESTION), ("assistant", "It is."), ("user", "Why?")]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"role": role, "content": text} for role, text in turns]))
    return path


def points(path) -> list[int]:
    return [c["tokens"] for c in vkv.inspect(path).checkpoints]


def test_a_cache_that_cannot_be_cut_gets_checkpoints_by_default(run, ring_model, tmp_path, talk):
    path = tmp_path / "a.vkv"
    ran = run("save", "--model", ring_model, "--messages", talk, "-o", path)
    found = vkv.inspect(path)
    assert len(found.checkpoints) >= 2
    assert found.checkpoints[0]["message"]
    assert "note: this cache cannot be cut: checkpoints after " in ran.out
    text = tiny.tokenizer().decode(vkv.load(path).tokens[: found.checkpoints[0]["tokens"]])
    assert SYSTEM in text
    assert QUESTION not in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--checkpoints", "20,40"], [20, 40, -1]),
        (["--checkpoints", "none"], []),
        (["--checkpoint-every", 30, "--checkpoint-share", 50], [30, 60, 90, -1]),
        (["--checkpoints", "messages", "--checkpoint-share", 0], []),
    ],
)
def test_where_checkpoints_are_taken(run, ring_model, tmp_path, talk, options, expected):
    path = tmp_path / "a.vkv"
    ran = run("save", "--model", ring_model, "--messages", talk, "-o", path, *options)
    assert ran.status == 0, ran.err
    last = vkv.inspect(path).tokens - 1
    found = [p for p in points(path) if p <= 90 or p == last]
    assert found == [last if p < 0 else p for p in expected]


def test_a_cache_that_can_be_cut_gets_none(run, model, tmp_path, talk):
    path = tmp_path / "a.vkv"
    ran = run("save", "--model", model, "--messages", talk, "-o", path, "--checkpoints", "20")
    assert points(path) == []
    assert "can be cut anywhere: no checkpoints" in ran.err


@pytest.mark.parametrize(
    "options",
    [
        ["--checkpoints", "x"],
        ["--checkpoints", "20", "--checkpoint-every", 3],
        ["--checkpoints", "-5"],
        ["--checkpoint-share", "nan"],
        ["--checkpoint-every", 0],
    ],
)
def test_options_of_checkpoints_that_are_refused(run, ring_model, tmp_path, options):
    ran = run("save", "--model", ring_model, "-p", "Hi", "-o", tmp_path / "a.vkv", *options)
    assert ran.status == 2
    assert not (tmp_path / "a.vkv").exists()


def test_generate_goes_on_at_a_point_and_keeps_one_more(run, ring_model, tmp_path, talk):
    first, second = tmp_path / "a.vkv", tmp_path / "b.vkv"
    run("save", "--model", ring_model, "--messages", talk, "-o", first)
    held, at = vkv.inspect(first).tokens, points(first)
    options = ["--prompt", "And?", "--max-tokens", 3, "--json"]
    ran = run("generate", first, *options, "--model", ring_model, "--save", second)
    assert ran.json["prompt_tokens"]["reused"] == held
    assert points(second)[-1] == held
    assert points(second)[0] == at[0]
    ran = run("generate", second, *options, "--model", ring_model, "--at", at[0] + 1)
    assert ran.json["prompt_tokens"]["reused"] == at[0]
    assert ran.json["notes"] == [
        f"at {at[0]} tokens, the nearest usable point to the {at[0] + 1} asked for"
    ]
    ran = run("generate", second, *options, "--model", ring_model, "--at", 1)
    assert ran.status == 1
    assert "no point at or before 1 tokens" in ran.err
