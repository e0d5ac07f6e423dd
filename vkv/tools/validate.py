"""Check a file and list every finding, not only the first: ``vkv.validate``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vkv._paths import check_path
from vkv.codecs.segment_check import check_rereads, fit
from vkv.errors import VkvError
from vkv.format.dependencies import FileResolver, SearchPath, open_sound, resolver_for
from vkv.format.document import Document, open_document
from vkv.format.framing import HEADER
from vkv.format.kinds import KINDS
from vkv.format.layer_rules import check_layer, check_layers, is_basis
from vkv.format.layers import external_references, segment_shape, segments, stored_layers
from vkv.format.schema import Tensor
from vkv.identity.heads import check_heads


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a file.

    Attributes:
        severity: ``"error"`` if the file cannot be used, else ``"warning"``.
        rule: Number of the broken rule in ``spec/v1``, if there is one.
        at: Path to the value, e.g. ``layers[3].keys``.
        message: What was found, then what was expected.
    """

    severity: str
    rule: str | None
    at: str | None
    message: str

    def __str__(self) -> str:
        where = f"{self.at}: " if self.at else ""
        return f"{self.severity}: {where}{self.message}{f' [{self.rule}]' if self.rule else ''}"


@dataclass(slots=True)
class Report:
    """All findings about one file; ``ok`` if none is an error.

    Attributes:
        path: As it was given.
        deep: Whether every tensor was decoded.
        findings: In the order of the file.
    """

    path: str
    deep: bool
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(f.severity != "error" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "schema_version": 1,
            "path": self.path,
            "deep": self.deep,
            "ok": self.ok,
            "findings": [
                {"severity": f.severity, "rule": f.rule, "at": f.at, "message": f.message}
                for f in self.findings
            ],
        }


def validate(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    model: Any = None,
    tokenizer: Any = None,
    search_paths: Iterable[SearchPath] | None = None,
) -> Report:
    """Check a file: framing, header, layers, codecs, and the digest of every tensor.

    Args:
        path: A ``.vkv`` file, or a URL as ``vkv.inspect`` takes it.
        deep: Also decode every tensor and look for keys and values that are not finite.
        model: Compare the file with this model.
        tokenizer: ... and with this tokenizer.
        search_paths: Where the files it depends on are looked for, as in ``vkv.load``.
            What is used of them is checked too.

    Returns:
        Every finding. Damage to framing or header hides what lies behind it.

    Raises:
        OSError: The file cannot be opened.
    """
    check_path(path)
    report = Report(os.fspath(path), deep)
    try:
        document = open_document(path)
    except VkvError as exc:
        exc.at = (exc.at or "").removeprefix(report.path).removeprefix(": ") or None
        report.findings.append(_finding(exc))
        return report
    with document:
        resolver = resolver_for(document, search_paths)
        found = _errors(document, resolver, deep, model, tokenizer)
        report.findings += [_finding(error) for error in found]
        report.findings += _warnings(document)
    return report


def _finding(exc: VkvError, severity: str = "error") -> Finding:
    return Finding(severity, exc.rule, exc.at, exc.message)


def _errors(
    document: Document, resolver: FileResolver, deep: bool, model: Any, tokenizer: Any
) -> Iterator[VkvError]:
    found = [*_layer_errors(document), *_codec_errors(document)]
    found += [*_digest_errors(document), *_other_errors(document, resolver)]
    yield from found
    if deep and not found:  # values mean something only where all else is right
        yield from _value_errors(document, resolver)
    if model is not None or tokenizer is not None:
        yield from _owner_errors(document, model, tokenizer)


def _layer_errors(document: Document) -> Iterator[VkvError]:
    broken = False
    for path, layer in stored_layers(document.header):
        try:
            check_layer(layer, path)
        except VkvError as exc:
            broken = True
            yield exc
    for check in () if broken else (check_layers, check_heads):
        try:
            check(document.header)
        except VkvError as exc:
            yield exc


def _codec_errors(document: Document) -> Iterator[VkvError]:
    for path, _, tensor, segment in segments(document.header):
        try:
            fit(document.header, segment, segment_shape(tensor, segment))
        except VkvError as exc:
            yield exc.within(path)
    try:
        check_rereads(document.header)
    except VkvError as exc:
        yield exc


def _digest_errors(document: Document) -> Iterator[VkvError]:
    for name in document.entries:  # as they lie in the file; the header has them sorted
        try:
            if name != HEADER:
                document.check(name)
        except VkvError as exc:
            yield exc


def _other_errors(document: Document, resolver: FileResolver) -> Iterator[VkvError]:
    """Check that what is used of each dependency is there and undamaged."""
    for key in external_references(document.header):
        try:
            open_sound(resolver, key, document.header).document.close()
        except VkvError as exc:
            yield exc


def _value_errors(document: Document, resolver: FileResolver) -> Iterator[VkvError]:
    """Decode each tensor once; keys and values must be finite, and no slot may hold NaN.

    Some models keep a running maximum in a slot of recurrent state, which starts at minus infinity.
    """
    import mlx.core as mx

    from vkv.arrays.cache_file import CacheFile
    from vkv.caches.loading.decode import decode

    tensors = [
        (at, x, name) for at, x in stored_layers(document.header) for name in sorted(x.tensors)
    ]
    with CacheFile(document, resolver=resolver) as file:
        for at, layer, name in tensors:
            try:
                x = decode(file, layer, name, at)
            except VkvError as exc:
                yield exc
                continue
            slots = layer.kind in KINDS and KINDS[layer.kind].content == "slots"
            allowed = ~mx.isnan(x) if slots else mx.isfinite(x)
            if mx.issubdtype(x.dtype, mx.floating) and not allowed.all().item():
                found = "NaN" if slots else "values that are not finite"
                yield VkvError(f"holds {found}", rule="D2", at=f"{at}.{name}")


def _owner_errors(document: Document, model: Any, tokenizer: Any) -> Iterator[VkvError]:
    from vkv.caches.loading.owner import check_owner

    try:
        check_owner(document.header, model, tokenizer)
    except VkvError as exc:
        yield exc


def _warnings(document: Document) -> list[Finding]:
    head = document.header
    wanted = ("model",) if is_basis(head) else ("model", "tokenizer", "tokens")
    missing = [n for n in wanted if getattr(head, n) is None]
    found = [
        Finding("warning", None, n, "not recorded in the file, so it cannot be checked")
        for n in missing
    ]
    notes = [(f"{p}.{n}", t) for p, layer in stored_layers(head) for n, t in layer.tensors.items()]
    return found + [_note(at, tensor) for at, tensor in notes if tensor.note]


def _note(at: str, tensor: Tensor) -> Finding:
    return Finding("warning", None, at, tensor.note or "")
