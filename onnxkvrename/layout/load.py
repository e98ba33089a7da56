"""From the paths of a command line to the layout of the model, or the set, that they lead to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding, format_list, promote_to_errors, suggest_similar
from onnxkvrename.layout.digest import find_stamp_mismatches
from onnxkvrename.layout.dims import list_symbols
from onnxkvrename.layout.layout import Layout, apply_dtypes, apply_sizes, build_layout
from onnxkvrename.layout.manifest import parse_manifest
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.kv_model import KvModel, check_models_together, read_kv_model
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import MERGED, PREFIXED, WINDOW, Rules
from onnxkvrename.rules.results import ModelReport, report_model
from onnxkvrename.rules.windows import (
    PartGroup,
    group_parts,
)
from onnxkvrename.sidecars.formats.custom_io import parse_custom_io_dtypes
from onnxkvrename.sidecars.specializations import parse_specializations
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
    models = [read_kv_model(job.model, rules, check_data=False) for job in find_jobs(paths)]
    candidates = models if known.group_windows else [m._replace(part=None) for m in models]
    set_findings = check_models_together(candidates, rules, TokenChange(None), judge=True)
    selected = _select_layout_models(models)
    layout = build_layout(selected)
    stamp_findings = _check_set_stamps(selected, layout)
    reports = []
    for model, findings_of_set in zip(models, set_findings, strict=True):
        findings = (*model.findings, *findings_of_set)
        if model.path in stamp_findings:
            findings = (*findings, stamp_findings[model.path])
        findings = promote_to_errors(findings) if strict else findings
        reports.append(_set_status(report_model(model)._replace(findings=findings)))
    stamps = {model.stamp for model in selected}
    stamp = stamps.pop() if len(stamps) == 1 else None
    return LoadedLayout(apply_compile_info(layout, known), tuple(reports), stamp)


def _check_set_stamps(models: Sequence[KvModel], layout: Layout) -> Mapping[str, Finding]:
    """Return KV621 by the models' paths; a window alone does not know the stamp of its set."""
    if len(models) == 1 and models[0].is_window:
        return {}
    return find_stamp_mismatches(layout, {model.path: model.stamp for model in models})


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
    path = str(known.custom_io_path)
    dtypes = parse_custom_io_dtypes(read_text_file(known.custom_io_path), path)
    try:
        return apply_dtypes(layout, dtypes)
    except ModelError as error:
        raise ModelError(error.message, path=path, hint=error.hint) from None


def check_size_symbols(sizes: Iterable[str], symbols: Sequence[str], option: str = "--dim") -> None:
    """Raise :class:`KvRenameError` for a size that was given in vain; without symbols all are."""
    strange = [symbol for symbol in sizes if symbol not in symbols]
    if strange and symbols:
        said = f"buffers have no such dimension; they have {format_list(symbols)}"
        hint = suggest_similar(strange[0], symbols)
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


def _select_layout_models(models: Sequence[KvModel]) -> tuple[KvModel, ...]:
    """Return the models with buffers, or those that stand for all of them.

    A merged model stands for the windows that it was made from.
    """
    models = [model for model in models if model.pairs]
    if any(model.part is None for model in models):
        return _require_single_model(models)
    groups = sorted(group_parts(models), key=lambda group: _STAGE_PRECEDENCE.index(group.stage))
    layers = [{pair.layer for pair in model.pairs} for model in models]
    all_layers = set().union(*layers)
    for group in groups if _is_single_export(groups) else ():
        merged_alone = [(index,) for index in group.part_indexes]
        for indexes in merged_alone if group.stage == MERGED else [group.part_indexes]:
            if set().union(*(layers[index] for index in indexes)) == all_layers:
                return tuple(models[index] for index in indexes)
    return _require_single_model(models)


def _require_single_model(models: Sequence[KvModel]) -> tuple[KvModel, ...]:
    """Return the only model, or raise :class:`ModelError` for several unrelated ones."""
    if len(models) > 1:
        raise ModelError(
            f"is another model than {models[0].path}",
            path=models[1].path,
            hint="give one, or the windows of one, called as they were exported",
        )
    return tuple(models)


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
