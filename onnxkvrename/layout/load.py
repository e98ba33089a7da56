"""From the paths of a command line to the layout of the model, or the set, that they lead to."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding, format_list, promote_to_errors
from onnxkvrename.layout.dims import list_symbols
from onnxkvrename.layout.layout import (
    Layout,
    LayoutSource,
    apply_dtypes,
    apply_sizes,
    build_layout,
    find_stamp_mismatches,
)
from onnxkvrename.layout.manifest import parse_manifest
from onnxkvrename.model.file import open_model
from onnxkvrename.model.metadata import read_stamp
from onnxkvrename.model.occurrences import find_occurrences
from onnxkvrename.model.proto_reader import read_export_info
from onnxkvrename.model.signature import Signature
from onnxkvrename.rules.checks import check_pairs
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.plan import RenamePlan, TokenChange, build_minimal_plan
from onnxkvrename.rules.profile import MERGED, PREFIXED, WINDOW, Rules
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.rules.windows import (
    PartGroup,
    SetCandidate,
    SetPart,
    build_part,
    check_models_together,
    group_parts,
    is_window_path,
)
from onnxkvrename.sidecars.formats.custom_io import CUSTOM_IO_FORM, find_custom_io_dtypes
from onnxkvrename.sidecars.specializations import parse_specializations
from onnxkvrename.sidecars.text_edit import UnreadableTextError
from onnxkvrename.sidecars.yaml_text import parse_yaml_tree
from onnxkvrename.storage.read import open_file, read_text_file

_STAGE_PRECEDENCE = (MERGED, PREFIXED, WINDOW)
"""The last one first: it stands for those before it."""
_MAX_MANIFEST_BYTES = 1 << 26
"""Bytes of a manifest, far beyond any."""


class CompileInfo(NamedTuple):
    """What is known beside the models: sizes of symbols, and files of a compile.

    ``sets`` is false for windows that shall not be held against each other.
    """

    sizes: Mapping[str, int] = MappingProxyType({})
    specializations_path: Path | None = None
    custom_io_path: Path | None = None
    group_windows: bool = True


class LoadedLayout(NamedTuple):
    """A layout, and what was found of each model, those without buffers included.

    ``stamp`` is what all models of the layout carry in their metadata.
    """

    layout: Layout
    reports: tuple[ModelReport, ...]
    stamp: str | None = None

    @property
    def failed(self) -> bool:
        """Whether something is wrong with any model."""
        return any(report.failed for report in self.reports)

    def add_findings(self, findings: Iterable[Finding]) -> LoadedLayout:
        """The same, with more that was found of the layout, told with its first model."""
        first = next(iter(self.layout.models), None)
        more = tuple(findings)
        reports = (
            _set_status(report._replace(findings=(*report.findings, *more)))
            if report.path == first
            else report
            for report in self.reports
        )
        return self._replace(reports=tuple(reports))

    def remove_findings(self, code: str) -> LoadedLayout:
        """The same, as if nothing of this code had been found."""
        reports = (
            report._replace(findings=tuple(f for f in report.findings if f.code != code))
            for report in self.reports
        )
        return self._replace(reports=tuple(map(_set_status, reports)))


class _ReadModel(NamedTuple):
    """A model as it was read."""

    report: ModelReport
    signature: Signature
    plan: RenamePlan
    part: SetPart | None
    stamp: str | None


def load_layout(
    paths: Sequence[Path], rules: Rules, known: CompileInfo | None = None, *, strict: bool = False
) -> LoadedLayout:
    """The layout of one model or set, as it stands; nothing is written.

    Windows count in the order of their layers. Where a merged model is given
    beside its windows, it stands for them; a model without buffers, such as an
    encoder, is no part of the layout. Raises :class:`ModelError` for a model that
    cannot be read, and for models that are not one.
    """
    known = known or CompileInfo()
    read = [_read_model(job.model, rules) for job in find_jobs(paths)]
    seen = [
        SetCandidate(
            tuple(value.name for value in one.signature.outputs),
            one.plan.pairs,
            one.part if known.group_windows else None,
        )
        for one in read
    ]
    further = check_models_together(seen, rules, TokenChange(None), judge=True)
    chosen = _select_layout_models(read, rules)
    layout = build_layout(
        [LayoutSource(one.report.path, one.signature, one.plan) for one in chosen]
    )
    wrong = _check_set_stamps(chosen, layout, rules)
    reports = []
    for one, found in zip(read, further, strict=True):
        findings = (*one.report.findings, *found)
        if one.report.path in wrong:
            findings = (*findings, wrong[one.report.path])
        findings = promote_to_errors(findings) if strict else findings
        reports.append(_set_status(one.report._replace(findings=findings)))
    carried = {one.stamp for one in chosen}
    stamp = carried.pop() if len(carried) == 1 else None
    return LoadedLayout(apply_compile_info(layout, known), tuple(reports), stamp)


def _check_set_stamps(
    chosen: Sequence[_ReadModel], layout: Layout, rules: Rules
) -> Mapping[str, Finding]:
    """KV621, by the models' paths; a window alone cannot tell what its set is stamped with."""
    if len(chosen) == 1 and is_window_path(chosen[0].report.path, rules):
        return {}
    return find_stamp_mismatches(layout, {one.report.path: one.stamp for one in chosen})


def load_model_or_manifest(
    path: Path, rules: Rules, known: CompileInfo | None = None
) -> LoadedLayout:
    """The layout of what stands on one side of a hand-off: a model, a set, or a manifest of one.

    A manifest is told by its content. Its sizes stand, its dtypes unless ``known`` says
    otherwise, and its findings are those of the model that it was made from. Raises
    :class:`ModelError` as :func:`gather` does, and for a damaged manifest.
    """
    if not _is_json_file(path):
        return load_layout([path], rules, known)
    found = parse_manifest(read_text_file(path, _MAX_MANIFEST_BYTES), str(path))
    report = ModelReport(str(path), str(path), "unchanged", findings=found.findings)
    return LoadedLayout(
        apply_compile_info(found.layout, known or CompileInfo()),
        (_set_status(report),),
        found.stamp,
    )


def apply_compile_info(layout: Layout, known: CompileInfo) -> Layout:
    """The same layout, with the sizes and dtypes that are known from elsewhere.

    What a manifest says of sizes stands: others fill in what it does not say.

    A size given by hand comes before that of a file. Raises :class:`ModelError`
    for files of another form or another model, and :class:`KvRenameError` for
    a symbol on whose size specializations do not agree, and for one that the
    layout does not have.
    """
    symbols = layout.symbols
    check_size_symbols(known.sizes, symbols)
    for symbol, size in known.sizes.items():
        if layout.sizes.get(symbol, size) != size:
            said = f"{symbol}={layout.sizes[symbol]}, and --dim says {size}"
            hint = "leave it out, or write the manifest again"
            raise KvRenameError(f"a manifest says {said}", hint=hint)
    sizes = {**_read_specialized_sizes(layout, known), **known.sizes, **layout.sizes}
    layout = apply_sizes(layout, {name: sizes[name] for name in symbols if name in sizes})
    if known.custom_io_path is None:
        return layout
    try:
        return apply_dtypes(layout, _read_custom_io_dtypes(known.custom_io_path))
    except ModelError as error:
        raise ModelError(error.message, path=str(known.custom_io_path), hint=error.hint) from None


def check_size_symbols(sizes: Iterable[str], symbols: Sequence[str], option: str = "--dim") -> None:
    """Raise :class:`KvRenameError` for a size that was given in vain; without symbols all are."""
    strange = [symbol for symbol in sizes if symbol not in symbols]
    if strange and symbols:
        close = difflib.get_close_matches(strange[0], symbols, n=1)
        said = f"buffers have no such dimension; they have {format_list(symbols)}"
        hint = f"did you mean {close[0]}?" if close else None
        raise KvRenameError(f"{option} {strange[0]}: {said}", hint=hint)


def _read_specialized_sizes(layout: Layout, known: CompileInfo) -> Mapping[str, int]:
    """Sizes from specializations. What they do not agree on matters, unless it is the batch."""
    if known.specializations_path is None:
        return {}
    path = str(known.specializations_path)
    found = parse_specializations(read_text_file(known.specializations_path), path)
    needed = (
        set(list_symbols(buffer.sequence_shape for buffer in layout.buffers)) - known.sizes.keys()
    )
    for symbol in sorted(needed & found.conflicting_sizes.keys()):
        said = " and ".join(map(str, found.conflicting_sizes[symbol]))
        hint = f"--dim {symbol}=SIZE says which"
        raise KvRenameError(f"has {symbol} as {said}", path=path, hint=hint)
    for symbol in sorted(needed):
        if found.sizes.get(symbol, 1) < 1:
            raise KvRenameError(
                f"has {symbol} as {found.sizes[symbol]}", path=path, hint="a size is 1 or more"
            )
    return {symbol: size for symbol, size in found.sizes.items() if size > 0}


def _set_status(report: ModelReport) -> ModelReport:
    return report._replace(status="failed" if report.failed else "unchanged")


def _is_json_file(path: Path) -> bool:
    """Whether a plain file begins as a JSON object does, which no ONNX model does."""
    if os.path.isdir(path) or not os.path.exists(path):
        return False
    with open_file(path) as file:
        return file.read(0, 64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def _read_model(path: Path, rules: Rules) -> _ReadModel:
    with open_model(path) as model:
        plan = build_minimal_plan(model.signature, rules)
        ends = {end.old_name for pair in plan.pairs for end in pair.sides}
        survey = find_occurrences(model.source, {*ends, *plan.name_map.values()})
        findings = tuple(check_pairs(model.signature, plan, survey.build_name_uses(plan.name_map)))
        export = partial(read_export_info, model.source)
        part = build_part(path.as_posix(), model.signature, plan.pairs, rules, export)
        stamp = read_stamp(model.source)
    report = ModelReport(
        str(path), str(path), "unchanged", plan.pairs, plan.unchanged_names, findings
    )
    return _ReadModel(report, model.signature, plan, part, stamp)


def _select_layout_models(read: Sequence[_ReadModel], rules: Rules) -> tuple[_ReadModel, ...]:
    """The models that make up the layout: all with buffers, or those that stand for the rest."""
    having = [one for one in read if one.plan.pairs]
    parts = [one.part for one in having if one.part is not None]
    if len(parts) < len(having):
        return _require_single_model(having)
    groups = sorted(
        group_parts(parts, rules), key=lambda group: _STAGE_PRECEDENCE.index(group.stage)
    )
    layers = [{pair.layer for pair in one.plan.pairs} for one in having]
    every = set().union(*layers)
    for group in groups if _is_single_export(groups) else ():
        files = (
            [(at,) for at in group.part_indexes] if group.stage == MERGED else [group.part_indexes]
        )
        for chosen in files:
            if set().union(*(layers[at] for at in chosen)) == every:
                return tuple(having[at] for at in chosen)
    return _require_single_model(having)


def _require_single_model(having: Sequence[_ReadModel]) -> tuple[_ReadModel, ...]:
    """The only model. Raises :class:`ModelError` for more that do not belong together."""
    if len(having) > 1:
        first, second = having[0].report.path, having[1].report.path
        raise ModelError(
            f"is another model than {first}",
            path=second,
            hint="give one, or the windows of one, called as they were exported",
        )
    return tuple(having)


def _is_single_export(groups: Sequence[PartGroup]) -> bool:
    """Whether these are stages of one export, as their places and names tell."""
    models = {group.model_name for group in groups if group.model_name}
    roots = sorted((group.root for group in groups), key=len)
    return (
        len({group.stage for group in groups}) == len(groups)
        and len(models) <= 1
        and all(_is_within(inner, outer) for outer, inner in pairwise(roots))
    )


def _is_within(inner: str, outer: str) -> bool:
    return inner == outer or not outer or inner.startswith(outer.rstrip("/") + "/")


def _read_custom_io_dtypes(path: Path) -> Mapping[str, str]:
    try:
        tree = parse_yaml_tree(read_text_file(path))
        return dict(find_custom_io_dtypes(tree)) if tree is not None else {}
    except UnreadableTextError as error:
        raise ModelError(
            f"cannot be taken as custom I/O: it {error}",
            path=str(path),
            hint=error.hint or f"its form: {CUSTOM_IO_FORM}",
        ) from None
