"""Imports point one way, without a cycle, and what must start fast imports little."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Rooms from the bottom up. A module imports its own room and those before it.
ROOMS = (
    "vkv._version", "vkv.errors", "vkv._atomic", "vkv._paths",
    "vkv.sources", "vkv.format", "vkv.identity", "vkv.codecs", "vkv.arrays",
    "vkv.distributed", "vkv.caches", "vkv.interop", "vkv.tools", "vkv.store", "vkv.serve",
    "vkv.demo", "vkv.bench", "vkv", "vkv.__main__", "vkv_cli",
)  # fmt: skip
#: Rooms that ``vkv inspect`` is made of: they import neither MLX nor NumPy.
LIGHT = ("vkv._version", "vkv.errors", "vkv._atomic", "vkv._paths", "vkv.sources", "vkv.format")
HEAVY = {
    "mlx", "mlx_lm", "numpy", "transformers", "tokenizers", "safetensors", "rich", "fsspec",
    "aiohttp",
}  # fmt: skip
#: Packages of LIGHT rooms that are imported when a URL is opened, inside functions.
ON_USE = {"fsspec", "aiohttp"}


def modules() -> dict[str, Path]:
    """Return every module of the project by its dotted name."""
    found = {}
    for root, package in ((ROOT, "vkv"), (ROOT / "cli", "vkv_cli")):
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


def room(name: str) -> int:
    """Return the index of the room of a module; the longest name in the table decides."""
    fits = [r for r in ROOMS if name == r or (name.startswith(r + ".") and r != "vkv")]
    assert fits, f"{name} stands in no room"
    return ROOMS.index(max(fits, key=len))


def imports(name: str, *, on_import: bool = False) -> set[str]:
    """Return the modules that a module imports, type-only imports included.

    With ``on_import``, only those that run when the module is imported.
    """
    tree = ast.parse(MODULES[name].read_text())
    found = set()
    for node in _eager(tree) if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {name}"
            base = node.module or ""
            deeper = {f"{base}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= deeper if len(deeper) == len(node.names) else {base, *deeper}
    return found


def _eager(node: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        found += [child, *_eager(child)]
    return found


def top(name: str) -> str:
    return name.split(".")[0]


def ours(name: str) -> set[str]:
    return {n for n in imports(name) if top(n) in ("vkv", "vkv_cli")}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_arrows_point_down(name):
    up = {n for n in ours(name) if room(n) > room(name)}
    assert up == set()
    if name.startswith("vkv."):
        assert "vkv" not in ours(name), "a module of the package imports the public API"


def test_no_module_imports_itself_in_a_circle():
    graph = {name: ours(name) & MODULES.keys() - {name} for name in MODULES}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_nothing_else_lies_flat_in_the_package():
    flat = {name for name in MODULES if name.count(".") == 1 and MODULES[name].stem != "__init__"}
    assert {n for n in flat if top(n) == "vkv"} == {
        "vkv.__main__", "vkv._atomic", "vkv._paths", "vkv._version", "vkv.errors",
    }  # fmt: skip


def test_no_codec_knows_a_file_or_a_url():
    below = (
        "vkv.errors",
        "vkv.codecs",
        "vkv.format.dtypes",
        "vkv.format.schema",
        "vkv.format.limits",
        "vkv.format.layers",
    )
    for name in MODULES:
        if name.startswith("vkv.codecs"):
            assert {n for n in ours(name) if not n.startswith(below)} == set(), name


@pytest.mark.parametrize("name", [n for n in sorted(MODULES) if ROOMS[room(n)] in LIGHT])
def test_light_rooms_import_nothing_heavy(name):
    assert not {top(n) for n in imports(name)} & (HEAVY - ON_USE)
    assert not {top(n) for n in imports(name, on_import=True)} & HEAVY


@pytest.mark.parametrize("name", sorted(MODULES))
def test_mlx_lm_is_imported_when_a_cache_is_touched_and_not_before(name):
    if room(name) <= ROOMS.index("vkv.interop"):
        assert "mlx_lm" not in {top(n) for n in imports(name, on_import=True)}
    if room(name) < ROOMS.index("vkv.caches"):
        assert "mlx_lm" not in {top(n) for n in imports(name)}


def test_inspect_imports_nothing_heavy():
    code = f"""if True:
        import sys, vkv
        vkv.inspect
        assert not {HEAVY!r} & sys.modules.keys(), {HEAVY!r} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
