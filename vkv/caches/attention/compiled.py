"""Put the source of a CUDA kernel together for one form of keys and values."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from vkv.caches.attention.sides import Side, Template

__all__ = ["kernel_of"]


def kernel_of(
    sides: tuple[Side, ...], template: Template, head: bool, shared: int
) -> Callable[..., list[mx.array]]:
    """Return the kernel for keys and values of these codecs; MLX compiles it at its first call.

    Args:
        sides: Keys and values.
        template: Constants beside theirs.
        head: There are exact tokens before the codes.
        shared: Bytes of shared memory of a block.
    """
    names = ["q", "tail_keys", "tail_values", "counters", "numbers", *sides[0].constants]
    names += ["head_keys", "head_values"] if head else []
    names += [name for part in sides for name, _ in part.parts]
    body = _BODY.replace("KEYS", sides[0].declaration).replace("VALUES", sides[1].declaration)
    if not head:
        body = re.sub(r"\bhead_(keys_shape\[2\]|keys|values)", "0", body)
    # MLX formats the constants of its own templates at each call.
    body = "".join(_constant(name, value) for name, value in template) + body
    files = tuple(dict.fromkeys(("codes.cuh", *sides[0].files, *sides[1].files)))
    top = f"constexpr bool SPREAD = {str('affine.cuh' in files).lower()};"
    files = (*files, "exact.cuh", "combine.cuh", "attend.cuh")
    return _kernel(files, top, body, tuple(names), shared)


def _constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_TYPES[value]};\n"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {str(value).lower()};\n"


@cache
def _kernel(
    files: tuple[str, ...], top: str, body: str, inputs: tuple[str, ...], shared: int
) -> Callable[..., list[mx.array]]:
    folder = resources.files("vkv.caches.attention").joinpath("kernels")
    texts = [folder.joinpath(file).read_text() for file in ("warp.cuh", *files)]
    digest = sha256("\n".join([top, *texts, body, *inputs]).encode()).hexdigest()[:16]
    if isinstance(folder, Path):  # MLX copies the text at each call: a name is shorter
        texts = [f'#include "{folder.resolve() / file}"' for file in ("warp.cuh", *files)]
    text = "\n".join([top, *texts])
    kernel: Any = mx.fast.cuda_kernel(
        name=f"vkv_attend_{digest}_{shared}",
        input_names=list(inputs),
        output_names=["sums", "out"],
        header=f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\nnamespace vkv {{\n{text}\n}}\n",
        source=body,
        shared_memory=shared,
    )
    return cast(Callable[..., list[mx.array]], kernel)


_TYPES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float"}
_BODY = """
    const int heads = tail_keys_shape[1], group = q_shape[1] / heads, length = q_shape[2];
    const int head = head_keys_shape[2], tail = tail_keys_shape[2];
    const int64_t row = blockIdx.y / ((group * length + 8 * NT - 1) / (8 * NT));
    KEYS
    VALUES
    vkv::Shape shape{heads, group, length, keys_coded, head, tail};
    constexpr int EACH = 4 * vkv::Exact<T, D>::EACH;
    const int splits = gridDim.x - (head + tail + EACH - 1) / EACH;
    vkv::attend_split<decltype(keys), decltype(values), T, D, NT, UNIT, STEP, 4, STAGES, CAUSAL>(
        keys, values, q, head_keys, head_values, tail_keys, tail_values, numbers[0], numbers[1],
        shape, splits, const_cast<vkv::u32*>(counters), sums, out);
"""
