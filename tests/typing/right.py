"""Calls that a type checker accepts."""

from pathlib import Path
from typing import Any

import vkv


def conversation(cache: list[Any], model: Any, tokenizer: Any) -> list[int]:
    info: vkv.Info = vkv.save(
        Path("a.vkv"), cache, tokens=[1, 2], model=model, tokenizer=tokenizer, codec="affine:bits=4"
    )
    assert info.accounting.adds_up
    prompt: vkv.Prompt = vkv.load("a.vkv", model=model, live="packed", search_paths=[Path(".")])
    return prompt.resume([1, 2, 3])


def report(path: str) -> list[str]:
    found: vkv.Report = vkv.validate(path, deep=True)
    findings: list[vkv.Finding] = found.findings
    difference: vkv.Diff = vkv.diff(path, path)
    return [str(f) for f in findings] + [d.at for d in difference.differences]


def store(cache: list[Any], model: Any, codec: vkv.CodecSpec) -> vkv.Hit | None:
    shelf = vkv.PromptStore(max_bytes="2GB")
    entry: vkv.Entry = shelf.put(cache, [1, 2], model=model, codec=codec)
    stats: vkv.Stats = shelf.stats()
    try:
        return shelf.get([1, 2, 3], model=model) if stats.entries and entry.size else None
    except vkv.VkvError:
        return None
