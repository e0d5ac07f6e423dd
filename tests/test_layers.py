"""Who may import whom. Arrows point one way, and what must start fast imports little."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: From the bottom up; a module may import what stands in its own layer or below.
LAYERS = (
    {"vkv.errors", "vkv._version"},
    {"vkv.canonical", "vkv.header", "vkv.atomic"},
    {"vkv.container"},
    {"vkv.remote_source", "vkv.http_source"},
    {"vkv.document"},
    {"vkv.account", "vkv.elsewhere", "vkv.info", "vkv.inline"},
    {"vkv.codecs"},
    {"vkv.arrays", "vkv.cuda", "vkv.file", "vkv.reader"},
    {"vkv.identity", "vkv.gguf"},
    {"vkv.live", "vkv.validate", "vkv.diff", "vkv.compat", "vkv.convert", "vkv.mlx_lm_files",
     "vkv.mlx_lm_layers", "vkv.demo_model"},
    {"vkv.store", "vkv.bench"},
    {"vkv.serve"},
    {"vkv"},
    {"vkv_cli"},
)  # fmt: skip
LIVE = next(i for i, layer in enumerate(LAYERS) if "vkv.live" in layer)

#: Run without MLX, NumPy and mlx-lm: ``vkv inspect`` is made of these.
LIGHT = ("vkv", "vkv.errors", "vkv.header", "vkv.container", "vkv.remote_source",
         "vkv.document", "vkv.account", "vkv.info", "vkv.atomic", "vkv.live",
         "vkv.live.form")  # fmt: skip
HEAVY = {"mlx", "mlx_lm", "numpy", "transformers", "tokenizers", "safetensors", "rich",
         "fsspec", "aiohttp"}  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for root in (ROOT, ROOT / "cli"):
        for path in (root / ("vkv" if root == ROOT else "vkv_cli")).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


def layer(name: str) -> int:
    """Index of the layer of a module; the longest name in the table decides."""
    while name:
        for i, names in enumerate(LAYERS):
            if name in names:
                return i
        name = name.rpartition(".")[0]
    raise AssertionError("stands in no layer")


def imports(name: str, *, top: bool = False) -> set[str]:
    """Modules that a module imports; with ``top``, only those it imports when it is imported."""
    tree = ast.parse(MODULES[name].read_text())
    nodes = list(_eager(tree)) if top else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {name}"
            base = node.module or ""
            deeper = {f"{base}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= deeper if len(deeper) == len(node.names) else {base, *deeper}
    return found


def _eager(node: ast.AST) -> list[ast.AST]:
    """Nodes that run on import: no function bodies, nothing under TYPE_CHECKING."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        found += [child, *_eager(child)]
    return found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_arrows_point_down(name):
    ours = {n for n in imports(name) if n.split(".")[0] in ("vkv", "vkv_cli")}
    up = {n for n in ours if layer(n) > layer(name)} - {"vkv"}
    assert up == set()
    if name.startswith("vkv."):
        assert "vkv" not in ours, "a module of the package imports its front door"


def test_every_module_has_a_place():
    tops = {".".join(name.split(".")[:2]) for name in MODULES if name.startswith("vkv.")}
    assert tops <= set().union(*LAYERS)


def test_header_knows_no_codec():
    assert not any(n.startswith("vkv.codecs") for n in imports("vkv.header"))
    assert not any(n.startswith("vkv.codecs") for n in imports("vkv.document"))


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_nothing_heavy(name):
    assert not {n.split(".")[0] for n in imports(name, top=True)} & HEAVY


@pytest.mark.parametrize("name", [n for n in sorted(MODULES) if layer(n) <= LIVE])
def test_mlx_lm_is_imported_when_a_cache_is_touched_and_not_before(name):
    assert "mlx_lm" not in {n.split(".")[0] for n in imports(name, top=True)}
    if layer(name) < LIVE:
        assert "mlx_lm" not in {n.split(".")[0] for n in imports(name)}


def test_light_modules_together():
    code = f"""if True:
        import importlib, sys
        for name in {LIGHT!r}:
            importlib.import_module(name)
        assert not {HEAVY!r} & sys.modules.keys(), {HEAVY!r} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
