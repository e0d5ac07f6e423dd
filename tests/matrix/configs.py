"""Find configurations of tiny models, one for each architecture of mlx-lm.

mlx-lm's source distribution has them in its own tests. They are read from there, as
literals: nothing of that file is run or copied.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Config = dict[str, Any]

#: A file of mlx-lm's tests, or a folder with an unpacked source distribution.
VARIABLE = "VKV_MLX_LM_SDIST"
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip


def source() -> Path | None:
    """Return the file that ``VKV_MLX_LM_SDIST`` leads to, if it is set."""
    if not (place := os.environ.get(VARIABLE)):
        return None
    found = [Path(place)] if Path(place).is_file() else Path(place).rglob("tests/test_models.py")
    return next(iter(sorted(found)), None)


def configs(path: Path) -> dict[str, Config]:
    """Read all configurations: name of the module in ``mlx_lm.models`` -> its arguments.

    Of several for one architecture the one with most settings is taken.
    """
    found: dict[str, Config] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            for name, config in _of_function(node):
                if len(config) > len(found.get(name, {})):
                    found[name] = config
    return dict(sorted(found.items()))


def _of_function(function: ast.FunctionDef) -> Iterator[tuple[str, Config]]:
    names: dict[str, Any] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name == "test_configs" and isinstance(node.value, ast.List):
                yield from _of_list(node.value)
            try:
                names[name] = _value(node.value, names)
            except ValueError:
                names.pop(name, None)
        elif isinstance(node, ast.Call):
            yield from _of_call(node, names)


def _of_list(node: ast.List) -> Iterator[tuple[str, Config]]:
    for item in node.elts:
        try:
            config = _value(item, {})
        except ValueError:
            continue
        yield config["model_type"], config


def _of_call(node: ast.Call, names: dict[str, Any]) -> Iterator[tuple[str, Config]]:
    """``llama.ModelArgs(…)`` and ``llama.ModelArgs.from_dict({…})``."""
    function = ast.unparse(node.func).split(".")
    if function[1:] not in (["ModelArgs"], ["ModelArgs", "from_dict"]):
        return
    try:
        if node.args:
            config = _value(node.args[0], names)
        else:
            config = {k.arg: _value(k.value, names) for k in node.keywords}
    except ValueError:
        return
    if isinstance(config, dict):
        yield function[0], config


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a literal, of a name bound to one, or of arithmetic on them.

    Raises:
        ValueError: It is something else.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple():
            return [_value(x, names) for x in node.elts]
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, names)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
        case ast.Dict():
            found: Config = {}
            for key, value in zip(node.keys, node.values, strict=True):
                found |= _value(value, names) if key is None else {
                    _value(key, names): _value(value, names)
                }  # fmt: skip
            return found
    raise ValueError(ast.unparse(node)[:80])
