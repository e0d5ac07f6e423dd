"""The public names, their documentation, and the tree of errors."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import vkv
from vkv import errors

ROOT = Path(__file__).parents[1]
PUBLIC = [
    "Accounting",
    "CacheError",
    "CodecError",
    "CodecSpec",
    "Collected",
    "ContainerError",
    "Diff",
    "Difference",
    "DigestError",
    "Entry",
    "Finding",
    "Found",
    "HeaderError",
    "Hit",
    "Info",
    "MismatchError",
    "MissingFileError",
    "NotVkvError",
    "Prompt",
    "PromptStore",
    "Remote",
    "Report",
    "Stats",
    "StoreUnavailableError",
    "TieredStore",
    "UnknownCodecError",
    "UnsupportedError",
    "VkvError",
    "__version__",
    "convert",
    "diff",
    "inspect",
    "load",
    "load_prompt_cache",
    "make_prompt_cache",
    "prefill",
    "pull",
    "push",
    "save",
    "save_prompt_cache",
    "train_basis",
    "validate",
]
FUNCTIONS = [n for n in PUBLIC if inspect.isfunction(getattr(vkv, n))]
CLASSES = [n for n in PUBLIC if inspect.isclass(getattr(vkv, n))]
MODULES = sorted([*(ROOT / "vkv").rglob("*.py"), *(ROOT / "cli" / "vkv_cli").rglob("*.py")])


def test_names_are_pinned():
    assert vkv.__all__ == PUBLIC == dir(vkv)


def test_the_page_lists_every_name():
    page = (ROOT / "docs" / "public-api.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(
        set(PUBLIC) - {"__version__"}
    )


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'vkv' has no attribute 'loda'"):
        _ = vkv.loda


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_document_arguments_result_and_errors(name):
    function = getattr(vkv, name)
    text = inspect.getdoc(function)
    assert text is not None
    for parameter in inspect.signature(function).parameters:
        if parameter not in ("file_name", "cache", "metadata", "return_metadata"):
            assert re.search(rf"^    {parameter}\b.*: ", text, re.MULTILINE), parameter
    assert re.search("^Raises:$|Raises as", text, re.MULTILINE)
    assert all(p.annotation is not p.empty for p in inspect.signature(function).parameters.values())


@pytest.mark.parametrize("name", CLASSES)
def test_classes_document_what_they_hold(name):
    cls = getattr(vkv, name)
    text = inspect.getdoc(cls)
    assert text is not None
    for field in getattr(cls, "__dataclass_fields__", {}):
        assert re.search(rf"\b{field}\b", text), field


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_say_what_they_are(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def drawn(text: str) -> dict[str, str]:
    """Child to parent, from a tree drawn with lines."""
    parents, found = ["VkvError"], {}
    for line in text.splitlines():
        if match := re.match(r"^(\s*(?:│\s+)*)[├└]── (\w+)", line):
            depth = match[1].count("│") + 1
            found[match[2]] = parents[depth - 1]
            parents[depth:] = [match[2]]
    return found


def test_tree_of_errors_is_the_one_that_is_drawn():
    classes = {n: c for n, c in vars(errors).items() if inspect.isclass(c)}
    real = {n: c.__base__.__name__ for n, c in classes.items() if c is not errors.VkvError}
    assert drawn(errors.__doc__ or "") == real
    assert errors.__all__ == sorted(classes)
    assert errors.VkvError.__base__ is Exception


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_documented(name):
    assert inspect.getdoc(getattr(errors, name))


def test_error_says_where_what_and_which_rule():
    error = errors.HeaderError("found this, expected that", rule="H2", at="kind")
    assert str(error) == "kind: found this, expected that [H2]"
    assert str(error.within("layers[0]")) == "layers[0].kind: found this, expected that [H2]"
    assert str(errors.VkvError("short")) == "short"
    known = {"affine": 1, "raw": 1}
    assert "newest known is 1" in str(errors.UnknownCodecError("affine", 2, known=known))
    assert "known codecs are affine, raw" in str(errors.UnknownCodecError("x", 1, known=known))
    assert errors.UnknownCodecError("x", 1, known=known).rule == "K1"
    both = errors.MismatchError(["one differs", "so does another"])
    assert str(both) == "one differs; so does another [I1]"
    assert both.differences == ["one differs", "so does another"]
