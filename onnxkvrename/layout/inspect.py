"""What is in a model file, at a glance. Weights are counted and never read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from onnxkvrename.errors import KvRenameError, RulesError
from onnxkvrename.findings import Finding, render_json_document, serialize_error
from onnxkvrename.layout.digest import check_stamp
from onnxkvrename.layout.fold import fold_alike
from onnxkvrename.layout.kinds import (
    BufferKind,
    find_pair_dtype,
    find_pair_shape,
    infer_buffer_kind,
)
from onnxkvrename.model.file import OpenModel, open_model
from onnxkvrename.model.proto_reader import read_export_info
from onnxkvrename.model.signature import Dim, ExportInfo
from onnxkvrename.model.statistics import ModelStats, collect_model_stats
from onnxkvrename.rules.kv_model import KvModel, scan_model
from onnxkvrename.rules.plan import KvPair, RenamePlan, UnchangedName
from onnxkvrename.rules.profile import Rules

SCHEMA = "onnxkvrename.inspect/1"
BufferState = Literal["plain", "token", "half", "missing", "broken"]
"""``half`` carries a token on one side only; ``broken`` has an error of its own.

A ``missing`` buffer is one that its layer should have.
"""


class ExternalFile(NamedTuple):
    """A file beside the model; ``size`` is in bytes, ``None`` where it cannot be used."""

    location: str
    size: int | None


class InspectedBuffer(NamedTuple):
    """A KV buffer, with the names of its two sides as they stand."""

    layer: int
    buffer: str
    scope: str
    kind: BufferKind
    state: BufferState
    dtype: str
    shape: tuple[Dim, ...] | None
    input: str | None
    output: str | None


class BufferGroup(NamedTuple):
    """Buffers that are of one kind, dtype and shape in the same layers."""

    kind: BufferKind
    buffers: tuple[str, ...]
    dtype: str
    shape: tuple[Dim, ...] | None
    layers: tuple[int, ...]


class StampStatus(NamedTuple):
    """The digest of a layout that a model carries, and whether its graph has that layout.

    Of a window that is not known: the stamp is its set's.
    """

    digest: str
    matches_graph: bool | None


class ModelSummary(NamedTuple):
    """What is in one model; of one that cannot be read only ``path`` and ``error``.

    ``size`` is that of the file in bytes; ``files`` are those beside it with the
    rest of its weights. ``tokens`` are those found, each with the number of
    names that carry it, of ``names`` that could.
    """

    path: str
    size: int = 0
    export: ExportInfo | None = None
    weight: ModelStats = ModelStats()
    files: tuple[ExternalFile, ...] = ()
    buffers: tuple[InspectedBuffer, ...] = ()
    token_counts: tuple[tuple[str, int], ...] = ()
    name_count: int = 0
    kept: tuple[UnchangedName, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None
    stamp: StampStatus | None = None

    @property
    def external_bytes(self) -> int:
        """Bytes of the data files that are there."""
        return sum(file.size or 0 for file in self.files)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have buffers, in order."""
        return tuple(sorted({buffer.layer for buffer in self.buffers}))

    @property
    def failed(self) -> bool:
        """Whether something is wrong with this model."""
        return self.error is not None or any(f.severity == "error" for f in self.findings)


def inspect_model(path: Path, rules: Rules) -> ModelSummary:
    """What is in the model at ``path``; what keeps it from being read is its ``error``.

    Raises :class:`RulesError` where the rules make names that could not be undone.
    """
    try:
        with open_model(path) as model:
            return summarize_model(model, rules)
    except RulesError:
        raise
    except KvRenameError as error:
        return ModelSummary(str(path), error=error)


def summarize_model(opened: OpenModel, rules: Rules) -> ModelSummary:
    """What is in an open model.

    Checked is the model as it stands: with the token that it carries as the one
    wished for. Raises :class:`ModelError` for bytes that are no model, and
    :class:`RulesError` as :func:`inspect` does.
    """
    scanned = scan_model(opened.source, opened.signature, opened.file.path, rules)
    model = scanned.model
    stamp, stamp_findings = _check_stamp(model)
    findings = (*model.findings, *stamp_findings)
    sizes = {file.location: file.size for file in model.data_files}
    return ModelSummary(
        path=model.path,
        size=opened.file.size,
        export=model.export or read_export_info(opened.source),
        weight=collect_model_stats(opened.source),
        files=tuple(
            ExternalFile(location, sizes.get(location))
            for location in model.data_locations
            if location
        ),
        buffers=tuple(_list_buffers(model.plan, _find_broken_names(model.plan, findings))),
        token_counts=tuple(model.plan.token_counts.most_common()),
        name_count=len({side.old_name for pair in model.pairs for side in pair.sides}),
        kept=model.plan.unchanged_names,
        findings=findings,
        stamp=stamp,
    )


def group_buffers(buffers: Iterable[InspectedBuffer]) -> tuple[BufferGroup, ...]:
    """The buffers that are there, by kind, dtype and shape, in the order of their layers."""
    rows = fold_alike(
        (item.buffer, item.layer, (item.kind, item.dtype, item.shape))
        for item in buffers
        if item.state != "missing"
    )
    return tuple(
        BufferGroup(kind, parts, dtype, shape, layers)
        for parts, layers, (kind, dtype, shape) in rows
    )


def _check_stamp(model: KvModel) -> tuple[StampStatus | None, tuple[Finding, ...]]:
    """Return the stamp of a model, and KV621 unless it is that of the graph."""
    if model.stamp is None:
        return None, ()
    if model.is_window:
        return StampStatus(model.stamp, None), ()
    finding = check_stamp(model, model.stamp)
    if finding is None:
        return StampStatus(model.stamp, True), ()
    return StampStatus(model.stamp, False), (finding,)


def _find_broken_names(plan: RenamePlan, findings: Iterable[Finding]) -> frozenset[str]:
    """The names that an error is about which lies in their pair itself."""
    wrong = {f.name for f in findings if f.severity == "error" and f.code.startswith("KV1")}
    return frozenset(wrong | {taken for name, taken in plan.duplicates if name in wrong})


def _list_buffers(plan: RenamePlan, broken: frozenset[str]) -> Iterator[InspectedBuffer]:
    """The pairs, and in their places those that their layers lack."""
    layers: dict[tuple[int, str], list[KvPair]] = {}
    for pair in plan.pairs:
        layers.setdefault((pair.layer, pair.kind), []).append(pair)
    for (layer, kind), pairs in layers.items():
        there = {pair.buffer for pair in pairs}
        for part in plan.buffers_by_kind[kind]:
            if part not in there:
                told = infer_buffer_kind(pairs[0], pairs)
                scope = pairs[0].scope
                yield InspectedBuffer(layer, part, scope, told, "missing", "", None, None, None)
            for pair in pairs:
                if pair.buffer == part:
                    yield _build_buffer(pair, infer_buffer_kind(pair, pairs), broken)


def _build_buffer(pair: KvPair, kind: BufferKind, broken: frozenset[str]) -> InspectedBuffer:
    return InspectedBuffer(
        layer=pair.layer,
        buffer=pair.buffer,
        scope=pair.scope,
        kind=kind,
        state=_classify_pair(pair, broken),
        dtype=find_pair_dtype(pair),
        shape=find_pair_shape(pair),
        input=None if pair.input is None else pair.input.old_name,
        output=None if pair.output is None else pair.output.old_name,
    )


def _classify_pair(pair: KvPair, broken: frozenset[str]) -> BufferState:
    if any(end.old_name in broken for end in pair.sides):
        return "broken"
    tokens = {end.token for end in pair.sides}
    if len(tokens) > 1:
        return "half"
    return "token" if tokens != {""} else "plain"


def summaries_to_json(
    found: Iterable[ModelSummary], code: int, fault: KvRenameError | None = None
) -> str:
    """One document, held against ``schemas/inspect-1.json`` by the tests."""
    return render_json_document(
        SCHEMA, "inspect", code, fault, models=[serialize_summary(one) for one in found]
    )


def serialize_summary(anatomy: ModelSummary) -> dict[str, Any]:
    """A model for programs: every key is always there, sizes are in bytes."""
    made, weight = anatomy.export, anatomy.weight
    return {
        "path": anatomy.path,
        "size": anatomy.size,
        "export": None
        if made is None
        else {
            "ir_version": made.ir_version,
            "producer": made.producer_name,
            "producer_version": made.producer_version,
            "opsets": [{"domain": domain, "version": version} for domain, version in made.opsets],
        },
        "nodes": weight.node_count,
        "functions": list(weight.function_names),
        "weights": {
            "inline_tensors": weight.inline_tensor_count,
            "inline_bytes": weight.inline_bytes,
            "external_tensors": weight.external_tensor_count,
            "external_bytes": anatomy.external_bytes,
            "files": [{"location": file.location, "bytes": file.size} for file in anatomy.files],
        },
        "layers": list(anatomy.layers),
        "tokens": [{"token": token, "names": count} for token, count in anatomy.token_counts],
        "names": anatomy.name_count,
        "stamp": None
        if anatomy.stamp is None
        else {"kv_layout_sha256": anatomy.stamp.digest, "holds": anatomy.stamp.matches_graph},
        "buffers": [buffer._asdict() for buffer in anatomy.buffers],
        "kept": [kept._asdict() for kept in anatomy.kept],
        "findings": [found._asdict() for found in anatomy.findings],
        "error": serialize_error(anatomy.error),
    }
