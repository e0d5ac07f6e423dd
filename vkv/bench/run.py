"""Runs the bench: one raw cache, then one row per codec."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from vkv import identity
from vkv.arrays.cache_file import CacheFile
from vkv.bench.quality import compare, log_probs, relative_error
from vkv.bench.report import Results, Row
from vkv.bench.timing import Timing, median
from vkv.caches.kinds.live import snapshot
from vkv.caches.loading.decode import decode
from vkv.caches.loading.load import load
from vkv.caches.prompt import Prompt
from vkv.caches.saving.basis_file import attached
from vkv.caches.saving.request import SaveRequest, codec_pair
from vkv.caches.saving.save import save
from vkv.caches.saving.write import encoded_contents
from vkv.codecs import registry
from vkv.errors import VkvError
from vkv.format.dependencies import FileResolver
from vkv.format.document import open_document
from vkv.format.info import Info

#: Tokens per forward pass of the prefill.
STEP = 512
#: Ends the name of a row that was saved with the basis file.
BASIS = " +basis"


def default_codecs() -> list[str]:
    """List the settings that each codec gives as its examples, raw first."""
    examples = [
        (not codec.traits.verbatim, text)
        for codec in registry.CODECS.values()
        for text in codec.examples
    ]
    return [text for _, text in sorted(examples)]


def with_basis(names: Sequence[str]) -> list[str]:
    """Add to each setting of a codec that can use a basis the same setting with it."""
    both = ((name, name + BASIS) for name in names)
    return [n for name, based in both for n in ((name, based) if _takes_basis(name) else (name,))]


def _takes_basis(name: str) -> bool:
    return registry.parse(name.partition("/")[0]).codec.traits.takes_basis


class Bench:
    """One model, one text, one raw cache.

    Args:
        model: An mlx-lm model.
        tokens: Ids of the text: at least ``context + test``.
        context: Tokens in the cache.
        test: Tokens read after it.
        repeat: Runs behind each median.
        name: How results call the model.
        basis: A file of ``vkv.train_basis``, for names that end in ``BASIS``.
        progress: Called with (tokens done, context) during the prefill.

    Raises:
        VkvError: The text is too short.
    """

    def __init__(
        self,
        model: Any,
        tokens: Sequence[int],
        *,
        context: int,
        test: int,
        repeat: int = 3,
        name: str = "",
        basis: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        if len(tokens) < context + test or context < 1 or test < 2:
            raise VkvError(
                f"a text of {len(tokens)} tokens, expected {context} of context and {test} of test",
                at="bench",
            )
        self.model, self.repeat, self.basis = model, repeat, basis
        self.ids = list(tokens[:context])
        self.test = list(tokens[context : context + test])
        self.raw, seconds = self._prefill(progress)
        self.reference = log_probs(model, self.clone(), self.test)
        elements = sum(_elements(c) for c in self.raw)
        self.results = Results(name, context, test, elements, seconds)

    def _prefill(self, progress: Callable[[int, int], None] | None) -> tuple[list[Any], float]:
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self.model)
        start = time.perf_counter()
        for at in range(0, len(self.ids), STEP):
            out = self.model(mx.array([self.ids[at : at + STEP]]), cache=cache)
            mx.eval(out)
            if progress is not None:
                progress(min(at + STEP, len(self.ids)), len(self.ids))
        return cache, time.perf_counter() - start

    def clone(self) -> list[Any]:
        """Copy the raw cache; growing the copy leaves the raw one as it is."""
        return copy.deepcopy(self.raw)

    def run(self, names: Sequence[str] | None = None) -> Iterator[Row]:
        """Measure each codec string; rows and failures are also kept in ``results``."""
        for name in names or default_codecs():
            with self.results.attempt(name):
                row = self.row(name)
                self.results.rows.append(row)
                yield row

    def row(self, name: str) -> Row:
        """Measure one codec string, ``KEYS/VALUES`` for one each, ``BASIS`` behind it or not."""
        case = _case(name, self.basis)
        with tempfile.TemporaryDirectory(prefix="vkv-bench-") as folder:
            path = Path(folder) / "cache.vkv"
            save_time = median(lambda: self._save(path, case), self.repeat)
            load_time = median(lambda: load(path, search_paths=case.search_paths), self.repeat)
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            prompt = load(path, search_paths=case.search_paths)
            peak = mx.get_peak_memory() - before
            return self._row(name, case, path, prompt, save_time, load_time, peak)

    def _save(self, path: Path, case: _Case) -> Info:
        return save(
            path, self.raw, tokens=self.ids, model=self.model, codec=case.codec,
            basis=case.basis, force=True,
        )  # fmt: skip

    def _row(
        self,
        name: str,
        case: _Case,
        path: Path,
        prompt: Prompt,
        save_time: Timing,
        load_time: Timing,
        peak: int,
    ) -> Row:
        info, cache = prompt.info, prompt.cache
        groups = info.accounting.groups
        errors = {n: self._error(cache, n) for n in ("keys", "values")}
        first = time.perf_counter()
        mx.eval(self.model(mx.array([self.test[:1]]), cache=copy.deepcopy(cache)))
        step = time.perf_counter() - first
        return Row(
            name=name,
            family=name.partition(":")[0] + (BASIS if case.basis else ""),
            bits=info.accounting.bits,
            size=info.size,
            ratio=info.accounting.ratio,
            quality=compare(self.reference, log_probs(self.model, cache, self.test), self.test),
            bits_keys=groups["keys"].bits if "keys" in groups else None,
            bits_values=groups["values"].bits if "values" in groups else None,
            error_keys=errors["keys"],
            error_values=errors["values"],
            encode=median(lambda: self._encode(case), self.repeat),
            save=save_time,
            load=load_time,
            decode=median(lambda: _decode(path, case.search_paths), self.repeat),
            peak=peak,
            first_token=load_time.seconds + step,
            notes=tuple(info.notes),
        )

    def _encode(self, case: _Case) -> None:
        """Do all that a save does but hashing and writing."""
        owner, ropes = identity.of_model(self.model)
        request = SaveRequest(
            codecs=codec_pair(case.codec),
            ropes=tuple(ropes),
            layer_ropes=owner.ropes,
            force=True,
        )
        with attached(case.basis, request.codecs.both(), owner, ropes) as basis:
            contents = encoded_contents(replace(request, basis=basis), map(snapshot, self.raw))
            for pending in contents.tensors.values():
                pending.load()

    def _error(self, cache: list[Any], name: str) -> float | None:
        """Return the relative squared error of all keys or values."""
        error = power = 0.0
        for raw, other in zip(self.raw, cache, strict=True):
            x, y = (snapshot(c).values.get(name) for c in (raw, other))
            if x is None or y is None or x.x is None or y.x is None:
                continue
            e, p = relative_error(x.x, y.x, centred=name == "keys")
            error, power = error + e, power + p
        return error / power if power else None


@dataclass(frozen=True, slots=True)
class _Case:
    """Hold what a row's name asks for."""

    codec: dict[str, str]
    basis: Path | None

    @property
    def search_paths(self) -> list[Path] | None:
        return None if self.basis is None else [self.basis]


def _case(name: str, basis: Path | None) -> _Case:
    keys, _, values = name.removesuffix(BASIS).partition("/")
    codec = {"keys": keys, "values": values or keys}
    return _Case(codec, basis if name.endswith(BASIS) else None)


def _decode(path: Path, search_paths: list[Path] | None) -> None:
    """Decode every tensor from memory, without verifying."""
    with open_document(path.read_bytes()) as document:
        file = CacheFile(document, verify=False, resolver=FileResolver(search_paths or ()))
        for i, layer in enumerate(document.header.layers):
            mx.eval([decode(file, layer, name, f"layers[{i}]") for name in layer.tensors])


def _elements(cache: Any) -> int:
    values = snapshot(cache).values.values()
    return sum(v.x.size for v in values if v.x is not None)
