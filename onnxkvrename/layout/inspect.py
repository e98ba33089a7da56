"""Summarize a model file: its KV buffers by layer, and their tokens."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import KvRenameError, ModelError, RulesError
from onnxkvrename.files.read import ModelSource
from onnxkvrename.findings import Finding
from onnxkvrename.layout.layout import (
    ByteTotals,
    Sizes,
    add_byte_totals,
    apply_sizes,
    build_buffers,
    build_layout,
    compute_byte_totals,
    fold_alike,
    list_symbols,
)
from onnxkvrename.layout.load import (
    LoadedLayout,
    add_shared_findings,
    build_loaded_layout,
    check_size_symbols,
    group_layout_models,
)
from onnxkvrename.layout.updates import (
    UNKNOWN_UPDATE,
    UNTRACED_UPDATE,
    BufferUpdate,
    ShownUpdate,
    Updates,
    UpdateTracer,
    find_faults,
)
from onnxkvrename.model.file import OpenModel, open_model
from onnxkvrename.model.proto_reader import (
    count_nodes,
    read_export_info,
    read_function_names,
)
from onnxkvrename.model.signature import Dim, ExportInfo
from onnxkvrename.records import fill_record
from onnxkvrename.rules.kinds import BufferKind
from onnxkvrename.rules.kv_model import KvModel, scan_model
from onnxkvrename.rules.plan import KvPair, RenamePlan, UnchangedName, is_layer_named
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import MERGED, PartPath
from onnxkvrename.sidecars.stale import find_stale_sidecars

NameStatus = Literal["plain", "token", "half", "missing", "broken"]
"""The status of a buffer's names; a recurrent state is something else.

``plain``: no token; ``token``: one token on both sides; ``half``: a token on one side only, or
two different ones; ``missing``: the layer lacks this buffer; ``broken``: an error is about it.
"""


class ExternalFile(NamedTuple):
    """A file beside the model with some of its weights.

    Attributes:
        location: Its path relative to the model, as the model names it.
        bytes: Its size; ``None`` where it is missing or cannot be used.
    """

    location: str
    bytes: int | None


@show_briefly
class InspectedBuffer(NamedTuple):
    """A KV buffer, with the names of its two sides as they are in the file.

    Attributes:
        layer: The number of the layer.
        buffer: The part of the name that says what is in the buffer, such as past_key.
        scope: The part of the name before the last slash, as in layerwise exports; usually empty.
        kind: vLLM's own strings; mamba for every state without a context axis.
        state: half: a token on one side only; broken: an error of its own; missing: its layer
            should have it.
        dtype: The element type, in ONNX's words; empty for a missing buffer.
        shape: Sizes and symbols, `None` for what the file does not say.
        input: The graph input of the pair; `None` if it is missing.
        output: The retained output of the pair; `None` if it is missing.
        kind_guessed: Whether only its shape or its name suggests the kind.
        update: How its output is made from its input.
    """

    layer: int
    buffer: str
    scope: str
    kind: BufferKind
    state: NameStatus
    dtype: str
    shape: tuple[Dim, ...] | None
    input: str | None
    output: str | None
    kind_guessed: bool = False
    update: ShownUpdate = UNKNOWN_UPDATE


class BufferGroup(NamedTuple):
    """Buffers with the same kind, dtype, shape and update in the same layers.

    The buffers are the parts of a layer, such as ``past_key`` and ``past_value``. Their kind is
    guessed if only shapes or names suggest it.
    """

    kind: BufferKind
    buffers: tuple[str, ...]
    dtype: str
    shape: tuple[Dim, ...] | None
    layers: tuple[int, ...]
    kind_guessed: bool = False
    update: BufferUpdate = UNTRACED_UPDATE


@show_briefly
class ModelSummary(NamedTuple):
    """The contents of one model; for one that cannot be read only ``path`` and ``error``.

    Attributes:
        path: The model.
        size: The size of its file in bytes.
        export: Who exported it, with which versions.
        node_count: The number of nodes of the main graph.
        function_names: The names of local functions.
        files: The files of external data.
        buffers: The KV buffers by layer, missing ones included.
        token_counts: Each token with the number of names that carry it, most frequent first.
        name_count: The number of names that can carry a token.
        kept: The names that a rename leaves alone, with the reasons.
        findings: The problems of the model.
        error: What kept it from being read.
        sizes: The sizes of symbols that were given.
        totals: The bytes of all buffers at these sizes; ``None`` where a buffer is there twice.
        part: What its path says about a set of windows; ``None`` outside of sets.
        feeds: The outputs that fill KV buffers of another model, which a rename changes as well.
        windows: For windows folded into one summary, each of them; then `path` is the directory
            that they have in common, empty for the working directory.
    """

    path: str
    size: int = 0
    export: ExportInfo | None = None
    node_count: int = 0
    function_names: tuple[str, ...] = ()
    files: tuple[ExternalFile, ...] = ()
    buffers: tuple[InspectedBuffer, ...] = ()
    token_counts: tuple[tuple[str, int], ...] = ()
    name_count: int = 0
    kept: tuple[UnchangedName, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None
    sizes: Sizes = MappingProxyType({})
    totals: ByteTotals | None = None
    part: PartPath | None = None
    feeds: tuple[str, ...] = ()
    windows: tuple[ModelSummary, ...] = ()

    @property
    def external_bytes(self) -> int:
        """The bytes of the data files that can be used."""
        return sum(file.bytes or 0 for file in self.files)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have buffers, in order."""
        return tuple(sorted({buffer.layer for buffer in self.buffers}))

    @property
    def failed(self) -> bool:
        """True if the model has an error or a finding of severity error."""
        return self.error is not None or any(f.severity == "error" for f in self.findings)


_TracedModel = tuple[KvModel, Updates]
"""A model with its findings, and how its buffers are updated."""


class Inspection(NamedTuple):
    """What is in some models.

    Attributes:
        summaries: A summary of each model.
        layouts: The layout of each model with KV buffers, or of the windows of one together;
            none where a buffer is there twice.
    """

    summaries: tuple[ModelSummary, ...]
    layouts: tuple[LoadedLayout, ...]


def inspect_models(
    paths: Iterable[ModelSource],
    rules: Rules,
    trace_updates: UpdateTracer | None = None,
    sizes: Sizes = MappingProxyType({}),
) -> Inspection:
    """Summarize models; windows of one model that carry different tokens have KV303.

    Without `trace_updates`, how buffers are updated stays unknown.

    Raises:
        KvRenameError: A size is of no symbol of the models.
        RulesError: A template of the rules makes names that could not be undone.
    """
    summaries: list[ModelSummary] = []
    read: dict[int, KvModel] = {}
    updates: dict[str, Updates] = {}
    for index, path in enumerate(paths):
        summary, traced = _read_summary(path, rules, trace_updates, sizes)
        summaries.append(summary)
        if traced is not None:
            read[index], updates[summary.path] = traced
    models = add_shared_findings(list(read.values()), rules)
    for index, model in zip(read, models, strict=True):
        # Whether windows are missing does not matter here.
        shared = (finding for finding in model.findings if finding.code == "KV303")
        findings = (*summaries[index].findings, *shared)
        summaries[index] = summaries[index]._replace(findings=findings)
    layouts = tuple(_build_layouts(models, updates, sizes))
    symbols = list_symbols(each.shape for summary in summaries for each in summary.buffers)
    check_size_symbols(sizes, symbols)
    return Inspection(tuple(summaries), layouts)


def _build_layouts(
    models: Sequence[KvModel], updates: Mapping[str, Updates], sizes: Sizes
) -> Iterator[LoadedLayout]:
    """Yield the layouts of some models; the only one has a report also on models without buffers.

    There is none where a buffer is there twice, of which there is a finding.
    """
    sets = group_layout_models(models)
    for selected in sets:
        reported = models if len(sets) == 1 else selected
        try:
            loaded = build_loaded_layout(reported, selected, updates)
        except ModelError:  # a buffer twice
            continue
        symbols = loaded.layout.symbols
        known = {symbol: size for symbol, size in sizes.items() if symbol in symbols}
        yield loaded._replace(layout=apply_sizes(loaded.layout, known))


def inspect_model(
    path: ModelSource, rules: Rules, trace_updates: UpdateTracer | None = None
) -> ModelSummary:
    """Summarize a model, in a file or in memory; of one that cannot be read, return the error.

    Without `trace_updates`, how buffers are updated stays unknown.

    Raises:
        RulesError: A template of the rules makes names that could not be undone.
    """
    return _read_summary(path, rules, trace_updates, MappingProxyType({}))[0]


def _read_summary(
    path: ModelSource, rules: Rules, trace_updates: UpdateTracer | None, sizes: Sizes
) -> tuple[ModelSummary, _TracedModel | None]:
    """Return the summary of a model, and the model if it can be read."""
    try:
        with open_model(path) as opened:
            return summarize_model(opened, rules, trace_updates, sizes)
    except RulesError:
        raise
    except KvRenameError as error:
        return ModelSummary(str(path), error=error), None


def summarize_model(
    opened: OpenModel,
    rules: Rules,
    trace_updates: UpdateTracer | None = None,
    sizes: Sizes = MappingProxyType({}),
) -> tuple[ModelSummary, _TracedModel]:
    """Summarize an open model, checked as it is: the token that most names carry is right.

    Without `trace_updates`, how buffers are updated stays unknown. The model is returned, too, for
    its layout and for what several models show together.

    Raises:
        ModelError: The bytes are not a readable model.
        RulesError: A template of the rules makes names that could not be undone.
    """
    path, beside = opened.file.path, opened.data_beside
    scanned = scan_model(opened.source, opened.signature, path, rules, data_beside=beside)
    model = scanned.model
    stale = find_stale_sidecars(path, model.pairs, rules) if beside is not None else ()
    updates: Mapping[str, BufferUpdate] = {}
    if trace_updates is not None and model.pairs:
        updates = trace_updates(opened.source, model.pairs)
    faults = find_faults(model.plan, updates)
    findings = (*model.findings, *faults, *stale)
    file_sizes = {file.location: file.size for file in model.data_files}
    summary = ModelSummary(
        path=model.path,
        feeds=tuple(feed.side.old_name for feed in model.plan.feeds),
        size=opened.file.size,
        export=model.export or read_export_info(opened.source),
        node_count=count_nodes(opened.source),
        function_names=read_function_names(opened.source),
        files=tuple(
            ExternalFile(location, file_sizes.get(location))
            for location in model.data_locations
            if location
        ),
        buffers=tuple(_list_buffers(model, _find_broken_names(model.plan, findings), updates)),
        token_counts=tuple(model.plan.token_counts.most_common()),
        name_count=len(model.plan.old_names),
        kept=model.plan.unchanged_names,
        findings=findings,
        sizes=sizes,
        totals=_compute_totals(model, sizes),
        part=model.part,
    )
    return summary, (model._replace(findings=findings), updates)


def _compute_totals(model: KvModel, sizes: Sizes) -> ByteTotals | None:
    try:
        return compute_byte_totals(apply_sizes(build_layout([model]), sizes))
    except ModelError:  # a buffer twice, of which there is a finding
        return None


def group_buffers(buffers: Iterable[InspectedBuffer]) -> tuple[BufferGroup, ...]:
    """Group buffers that are alike, in the order of their layers; skip missing ones.

    Layer 0 is left out if no name says it.
    """
    buffers = tuple(buffers)
    named = {
        each.layer
        for each in buffers
        if is_layer_named(each.layer, filter(None, (each.input, each.output)))
    }
    rows = fold_alike(
        (
            item.buffer,
            item.layer,
            (item.kind, item.dtype, item.shape, item.kind_guessed, item.update),
        )
        for item in buffers
        if item.state != "missing"
    )
    return tuple(
        BufferGroup(
            kind, parts, dtype, shape, tuple(sorted(named.intersection(layers))), is_guess, update
        )
        for parts, layers, (kind, dtype, shape, is_guess, update) in rows
    )


def _find_broken_names(plan: RenamePlan, findings: Iterable[Finding]) -> frozenset[str]:
    """Return the names whose own pair has an error."""
    wrong = {f.name for f in findings if f.severity == "error" and f.code.startswith("KV1")}
    return frozenset(wrong | {item.first_name for item in plan.duplicates if item.name in wrong})


def _list_buffers(
    model: KvModel, broken: frozenset[str], updates: Mapping[str, BufferUpdate]
) -> Iterator[InspectedBuffer]:
    """Yield the buffers by layer, with those that a layer lacks between those that it has."""
    plan = model.plan
    layers: dict[tuple[int, str], dict[str, list[InspectedBuffer]]] = {}
    for pair, buffer in zip(plan.pairs, build_buffers(model, updates), strict=True):
        found = fill_record(InspectedBuffer, buffer, state=_classify_pair(pair, broken))
        parts = layers.setdefault((pair.layer, pair.kind), {})
        parts.setdefault(pair.buffer, []).append(found)
    for (layer, kind), parts in layers.items():
        parts_here = {*plan.required_parts[kind], *parts}
        for part in (name for name in plan.part_order if name in parts_here):
            first = next(iter(parts.values()))[0]
            missing = InspectedBuffer(
                layer, part, first.scope, first.kind, "missing", "", None, None, None
            )
            yield from parts.get(part, (missing,))


def _classify_pair(pair: KvPair, broken: frozenset[str]) -> NameStatus:
    if any(side.old_name in broken for side in pair.sides):
        return "broken"
    tokens = {side.token for side in pair.sides}
    if len(tokens) > 1:
        return "half"
    return "token" if tokens != {""} else "plain"


def fold_windows(summaries: Iterable[ModelSummary]) -> tuple[ModelSummary, ...]:
    """Return the summaries with those of alike windows of a set as one, where the first was.

    Windows are alike if the same exporter made them; no two of them may have the same buffer. What
    is different from layer to layer is what the summary shows. Models that cannot be read, and
    those outside of sets, stay as they are.
    """
    sets: dict[Hashable, list[ModelSummary]] = {}
    for number, summary in enumerate(summaries):
        sets.setdefault(_find_set(summary) or number, []).append(summary)
    return tuple(
        folded
        for windows in sets.values()
        for folded in ([_fold(windows)] if _can_fold(windows) else windows)
    )


def _find_set(summary: ModelSummary) -> Hashable:
    """Return what alike windows of a set have in common; ``None`` for another model."""
    part = summary.part
    if part is None or part.name.stage == MERGED or summary.error is not None:
        return None
    return part.root, part.name.stage, part.name.model_name, summary.export


def _can_fold(windows: Sequence[ModelSummary]) -> bool:
    buffers = [(item.buffer, item.layer) for window in windows for item in window.buffers]
    return len(windows) > 1 and len(set(buffers)) == len(buffers)


def _fold(windows: Sequence[ModelSummary]) -> ModelSummary:
    ordered = sorted(windows, key=_find_first_layer)
    tokens: Counter[str] = Counter()
    for window in ordered:
        tokens.update(dict(window.token_counts))
    kept = {(item.name, item.reason): item for window in ordered for item in window.kept}
    buffers = chain.from_iterable(window.buffers for window in ordered)
    first = ordered[0]
    return ModelSummary(
        path="" if first.part is None else first.part.root,
        size=sum(window.size for window in ordered),
        export=first.export,
        node_count=sum(window.node_count for window in ordered),
        function_names=tuple(
            dict.fromkeys(chain.from_iterable(window.function_names for window in ordered))
        ),
        files=_list_files(ordered),
        buffers=tuple(sorted(buffers, key=lambda buffer: buffer.layer)),
        token_counts=tuple(tokens.most_common()),
        name_count=sum(window.name_count for window in ordered),
        kept=tuple(kept.values()),
        findings=tuple(chain.from_iterable(window.findings for window in ordered)),
        sizes=first.sizes,
        totals=add_byte_totals([window.totals for window in ordered]),
        part=first.part,
        windows=tuple(ordered),
    )


def _find_first_layer(window: ModelSummary) -> int:
    return 0 if window.part is None else window.part.name.first_layer


def _list_files(windows: Iterable[ModelSummary]) -> tuple[ExternalFile, ...]:
    """Return the files of external data; windows in one directory may have the same ones."""
    files: dict[tuple[str, str], ExternalFile] = {}
    for window in windows:
        directory = posixpath.dirname(window.path.replace("\\", "/"))
        for file in window.files:
            files.setdefault((directory, file.location), file)
    return tuple(files.values())
