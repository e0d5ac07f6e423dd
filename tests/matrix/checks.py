"""Check one architecture: what a user does with a cache, and who must be refused."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import vkv
from tests.matrix.configs import Config
from vkv.errors import CacheError, MismatchError

#: Larger sizes are cut down to these, at any depth of a configuration. phi3small writes to fixed
#: places of its logits.
MOST = {"vocab_size": 512, "intermediate_size": 256, "moe_intermediate_size": 128}
#: Sizes of configurations that name few, or those of real models.
SMALL: dict[str, Config] = {
    "cohere": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128},
    "cohere2": {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
                "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "gpt_bigcode": {"n_layer": 2},
    "gpt_neox": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128},
    "nanochat": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 4, "intermediate_size": 128},
    "phi3": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2},
}  # fmt: skip
#: Ids below 32, the smallest vocabulary.
PROMPT = [(7 * i + 3) % 29 for i in range(24)]
TURNS = [[5, 9, 2, 24], [17, 3, 11]]
LENGTH = "max_position_embeddings"
#: Largest difference of logits, beside the largest logit: other steps round otherwise.
CLOSE = 2e-3


def build(name: str, config: Config, seed: int = 0) -> Any:
    """Build a tiny model of ``mlx_lm.models.<name>`` with random weights."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    small = config if name == "phi3small" else _small(config)
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(small)))
    model.update(tree_map(_spread, model.parameters()))
    mx.eval(model.parameters())
    return model


def _spread(x: mx.array) -> mx.array:
    """Draw float weights anew where all are equal, so that every one of them counts."""
    if not mx.issubdtype(x.dtype, mx.floating) or x.size < 2 or mx.any(x != x.reshape(-1)[0]):
        return x
    return (x + 0.1 * mx.random.normal(x.shape)).astype(x.dtype)


def _small(config: Config) -> Config:
    return {
        key: _small(value) if isinstance(value, dict)
        else min(value, MOST[key]) if key in MOST and isinstance(value, int) else value
        for key, value in config.items()
    }  # fmt: skip


def changed(config: Config, key: str, factor: float) -> Config | None:
    """Multiply every ``key`` in a configuration; ``None`` if it has none."""
    found = False

    def walk(value: Any) -> Any:
        nonlocal found
        if not isinstance(value, dict):
            return value
        numbers = {k for k, v in value.items() if k == key and isinstance(v, int | float)}
        found = found or bool(numbers)
        return {k: type(v)(v * factor) if k in numbers else walk(v) for k, v in value.items()}

    after = walk(config)
    return after if found else None


def step(model: Any, ids: list[int], cache: list[Any]) -> mx.array:
    """Compute ``ids`` into ``cache`` and return the last logits, ``(V,)``.

    Tokens that a model rules out (minus infinity) are 0.
    """
    logits = model(mx.array([ids]), cache=cache)
    mx.eval(logits)
    last = logits[0, -1].astype(mx.float32)
    return mx.where(last == -mx.inf, 0.0, last)


def filled(model: Any, ids: list[int]) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    step(model, ids[:-5], cache)
    step(model, ids[-5:], cache)
    return cache


def arrays(cache: list[Any]) -> list[mx.array]:
    """All arrays of live caches; keys and values cut to the rows that hold a token."""
    found: list[mx.array] = []
    for one in cache:
        if hasattr(one, "caches"):
            found += arrays(one.caches)
            continue
        values = (one.keys, one.values) if hasattr(one, "keys") else one.state
        flat = [x for _, x in tree_flatten(values) if isinstance(x, mx.array)]
        found += [_rows(one, x) for x in flat] if hasattr(one, "keys") else flat
    return found


def _rows(cache: Any, x: mx.array) -> mx.array:
    """Rows that hold a token; of a ring those that a later token can see, in order of time."""
    if not hasattr(cache, "max_size"):
        rows = cache.offset - getattr(cache, "start_position", 0)
        return x[..., : min(rows, x.shape[-2]), :]
    ordered = x[..., : min(cache.offset, x.shape[-2]), :]
    if cache.offset > x.shape[-2]:
        ordered = cache._temporal_order(x)
    spare = max(0, ordered.shape[-2] - cache.max_size)
    first, rest = ordered[..., : cache.keep, :], ordered[..., cache.keep + spare :, :]
    return mx.concatenate([first, rest], axis=-2)


def equal(a: list[Any], b: list[Any]) -> bool:
    """Tell whether two caches have the same bits."""
    pairs = list(zip(arrays(a), arrays(b), strict=False))
    return len(arrays(a)) == len(arrays(b)) and all(
        x.dtype == y.dtype and x.shape == y.shape and bool(mx.array_equal(x, y, equal_nan=True))
        for x, y in pairs
    )


def apart(a: mx.array, b: mx.array) -> float:
    """Return the largest difference of logits over the largest logit."""
    return (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-6)).item()


def refuses(use: Callable[[], Any]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use()
    except MismatchError:
        return True
    return False


def not_here(exc: BaseException) -> str | None:
    """Return why an architecture cannot be checked here, if that is no fault."""
    if isinstance(exc, SystemExit):
        return "needs a package that is not installed"
    if isinstance(exc, CacheError) and exc.rule == "L1":
        return "has a cache class of its own, which save refuses"
    return "needs Metal" if isinstance(exc, RuntimeError) and "Metal" in str(exc) else None


class Architecture:
    """One architecture, a model of it, and a file of its caches.

    Args:
        name: Module in ``mlx_lm.models``.
        config: Its arguments.
        folder: For files.
    """

    def __init__(self, name: str, config: Config, folder: Path):
        self.name, self.path = name, folder / f"{name}.vkv"
        small = config | SMALL.get(name, {})
        self.model = build(name, small)
        self.config = self._defaults() | small
        self.cache = filled(self.model, PROMPT)
        vkv.save(self.path, self.cache, tokens=PROMPT, model=self.model)

    def _defaults(self) -> Config:
        """Return the settings that are changed later, where the class has a default."""
        args = getattr(self.model, "args", None)
        values = {key: getattr(args, key, None) for key in ("rope_theta", LENGTH)}
        return {key: value for key, value in values.items() if isinstance(value, int | float)}

    def like(self, config: Config) -> Any:
        """Build a model of another configuration with the weights of this one."""
        other = build(self.name, config)
        other.update(tree_unflatten(tree_flatten(self.model.parameters())))
        mx.eval(other.parameters())
        return other

    def raw_is_equal(self) -> None:
        """What ``raw`` stores comes back bit for bit, with the model at hand and without."""
        assert equal(vkv.load(self.path, model=self.model).cache, self.cache)
        assert equal(vkv.load(self.path).cache, self.cache)
        assert vkv.validate(self.path, model=self.model, deep=True).ok

    def lossy_goes_on(self) -> None:
        """Dense and packed caches of a lossy file hold the tokens and continue alike."""
        lossy = self.path.with_suffix(".lossy.vkv")
        vkv.save(lossy, self.cache, tokens=PROMPT, model=self.model, codec="affine:bits=8,group=32")
        dense, packed = (vkv.load(lossy, model=self.model, live=x) for x in ("dense", "packed"))
        assert dense.length == packed.length == vkv.load(self.path).length
        ids = [1, 2]
        got, want = (step(self.model, ids, p.cache) for p in (packed, dense))
        assert mx.isfinite(want).all()
        assert apart(got, want) < CLOSE, apart(got, want)

    def resumes_twice(self) -> None:
        """Two turns on a loaded prompt give the logits of a cache that was never stored."""
        prompt, live, ids = vkv.load(self.path, model=self.model), self.cache, list(PROMPT)
        live = copy.deepcopy(live)
        for turn in TURNS:
            ids += turn
            rest = prompt.resume(ids)
            assert rest == turn
            got, want = step(self.model, rest, prompt.cache), step(self.model, turn, live)
            prompt.extend([])
            assert apart(got, want) < CLOSE, apart(got, want)
        assert prompt.tokens == ids

    def trims_or_says_no(self) -> str:
        """A prompt that parts early gives what a fresh cache does, or L8 and no change."""
        prompt = vkv.load(self.path, model=self.model)
        ids = [*PROMPT[:-7], 20, 21, 22]
        refused = None
        try:
            rest = prompt.resume(ids)
        except CacheError as exc:
            refused = exc
        if refused:
            assert refused.rule == "L8"
            assert equal(prompt.cache, self.cache)
            return "cannot"
        assert rest == ids[-3:]
        fresh: list[Any] = make_prompt_cache(self.model)
        step(self.model, ids[:-3], fresh)
        live = copy.deepcopy(self.cache)
        trim_prompt_cache(live, len(PROMPT) - len(ids) + len(rest))
        got, cut, want = (step(self.model, rest, x) for x in (prompt.cache, live, fresh))
        noise = apart(cut, want)  # phi3small's attention depends on the steps of the prompt
        assert apart(got, want) < CLOSE + noise, (apart(got, want), noise)
        return "trimmed"

    def other_seed_is_refused(self) -> None:
        other = build(self.name, self.config, seed=1)
        assert refuses(lambda: vkv.load(self.path, model=other))

    def other_settings(self, key: str, factor: float) -> str:
        """Refused wherever the same weights give other caches.

        Returns:
            ``none`` (no such setting), ``same`` (caches are identical, and the file is taken),
            ``strict`` (identical, and refused) or ``refused``.
        """
        config = changed(self.config, key, factor)
        if config is None:
            return "none"
        other = self.like(config)
        same = equal(filled(other, PROMPT), self.cache) and bool(
            mx.array_equal(
                step(other, [1, 2], filled(other, PROMPT)),
                step(self.model, [1, 2], filled(self.model, PROMPT)),
            )
        )
        refused = refuses(lambda: vkv.load(self.path, model=other))
        assert same or refused, f"{key}: other caches, and the file is taken"
        return "refused" if not same else "strict" if refused else "same"

    def checks(self) -> Iterator[tuple[str, str | Exception]]:
        """Run all and yield a word or an error for each."""
        for name, check in {
            "raw": self.raw_is_equal,
            "lossy": self.lossy_goes_on,
            "resume": self.resumes_twice,
            "trim": self.trims_or_says_no,
            "seed": self.other_seed_is_refused,
            "rope": lambda: self.other_settings("rope_theta", 3.0),
            "length": lambda: self.other_settings(LENGTH, 2),
        }.items():
            try:
                yield name, check() or "ok"
            except Exception as exc:
                yield name, exc
