"""Load the layout of a model, of the windows of one, or of a file of `inspect`."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.files.find import list_models
from onnxkvrename.files.read import ModelSource, open_file, read_status, read_text_file
from onnxkvrename.findings import Finding, promote_to_errors
from onnxkvrename.layout.json import parse_layout
from onnxkvrename.layout.layout import (
    Layout,
    Sizes,
    apply_sizes,
    build_layout,
)
from onnxkvrename.layout.updates import Updates, UpdateTracer, find_faults
from onnxkvrename.limits import MAX_TEXT_BYTES
from onnxkvrename.model.file import open_model
from onnxkvrename.rules.check_together import check_models_together
from onnxkvrename.rules.kv_model import KvModel, scan_model
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import MERGED, PREFIXED, WINDOW
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.results import ModelReport, report_model
from onnxkvrename.rules.windows import PartGroup, group_parts
from onnxkvrename.text import format_list, quote_path, suggest_similar

_STAGE_PRECEDENCE = (MERGED, PREFIXED, WINDOW)
"""The stages of an export, the last one first: its models replace those of earlier ones."""


@show_briefly
class LoadedLayout(NamedTuple):
    """A layout, with a report on each model that was read.

    Attributes:
        layout: The KV buffers as a consumer sees them.
        reports: The problems of each model, including models without buffers.
        data_paths: Where the external data of all models lie, usable or not.
    """

    layout: Layout
    reports: tuple[ModelReport, ...]
    data_paths: tuple[Path, ...] = ()

    @property
    def failed(self) -> bool:
        """True if any model has an error or a finding of severity error."""
        return any(report.failed for report in self.reports)

    def remove_findings(self, code: str) -> LoadedLayout:
        """Return a copy without the findings of one code."""
        reports = (
            replace_findings(report, (each for each in report.findings if each.code != code))
            for report in self.reports
        )
        return self._replace(reports=tuple(reports))


def load_layout(
    paths: Sequence[ModelSource],
    rules: Rules,
    sizes: Sizes = MappingProxyType({}),
    *,
    strict: bool = False,
    trace: UpdateTracer | None = None,
) -> LoadedLayout:
    """Load the layout of one model, of the windows of one, or of a file; nothing is written.

    Windows come in the order of their layers. A merged model replaces the windows that it
    was made from. A model without buffers, such as an encoder, has a report but no part in
    the layout.

    A file that `inspect` wrote is recognized by its content. Its findings are those of the models
    that it was made from.

    Args:
        paths: Models and directories with models, one model in memory, or one file of `inspect`.
        rules: The rules that recognize KV names and the parts of sets.
        sizes: Sizes of symbolic dimensions.
        strict: Whether every warning is an error.
        trace: Tells how the buffers of a model are updated; without it that stays unknown. A
            file says itself what was found.

    Raises:
        ModelError: A model or a layout file cannot be read, or several models are not parts of
            one.
        KvRenameError: A size is of no symbol, or differs from the one in a layout file.
        RulesError: A template of the rules makes names that could not be undone.
    """
    if len(paths) == 1 and isinstance(paths[0], Path) and _is_json_file(paths[0]):
        return _load_file(paths[0], sizes, strict=strict)
    models, updates = [], {}
    for source in list_models(paths):
        with open_model(source) as opened:
            path, signature = opened.file.path, opened.signature
            model = scan_model(opened.source, signature, path, rules, data_beside=None).model
            if trace is not None and model.pairs:
                updates[model.path] = trace(opened.source, model.pairs)
                faults = find_faults(model.plan, updates[model.path])
                model = model._replace(findings=(*model.findings, *faults))
            models.append(model)
    models = add_shared_findings(models, rules)
    sets = group_layout_models(models)
    if len(sets) > 1:
        raise _build_several_models_error(models)
    selected = sets[0] if sets else ()
    _refuse_other_profiles(models, selected)
    loaded = build_loaded_layout(models, selected, updates, strict=strict)
    data_paths = dict.fromkeys(path for model in models for path in model.data_paths)
    return loaded._replace(
        layout=apply_given_sizes(loaded.layout, sizes), data_paths=tuple(data_paths)
    )


def build_loaded_layout(
    models: Sequence[KvModel],
    selected: Sequence[KvModel],
    updates: Mapping[str, Updates],
    *,
    strict: bool = False,
) -> LoadedLayout:
    """Return the layout of some models that were read, with a report on each.

    Args:
        models: The models, with what is wrong with them.
        selected: Those whose buffers make up the layout, one of `group_layout_models`.
        updates: As for :func:`build_layout`.
        strict: Whether every warning is an error.

    Raises:
        ModelError: Two models, or two pairs of one, are the same buffer.
    """
    others = (model.path for model in models if model.pairs and model not in selected)
    layout = build_layout(selected, updates)._replace(other_stages=tuple(others))
    return LoadedLayout(
        layout,
        tuple(
            replace_findings(report_model(model), model.findings, strict=strict) for model in models
        ),
    )


def _load_file(path: Path, sizes: Sizes, *, strict: bool) -> LoadedLayout:
    layout, findings = parse_layout(read_text_file(path, MAX_TEXT_BYTES), str(path))
    report = replace_findings(
        ModelReport(str(path), str(path), "unchanged"), findings, strict=strict
    )
    return LoadedLayout(apply_given_sizes(layout, sizes), (report,))


def replace_findings(
    report: ModelReport, findings: Iterable[Finding], *, strict: bool = False
) -> ModelReport:
    """Return a report with these findings, which say whether its model failed.

    Under `strict` all of them are errors.
    """
    found = tuple(findings)
    report = report._replace(findings=promote_to_errors(found) if strict else found)
    return report._replace(status="failed" if report.failed else "unchanged")


def apply_given_sizes(layout: Layout, sizes: Sizes) -> Layout:
    """Return the layout with sizes that a user gives; those of a layout file stay.

    Raises:
        KvRenameError: A size is of no symbol of the layout or differs from one that it has.
    """
    check_size_symbols(sizes, layout.symbols)
    for symbol, size in sizes.items():
        if layout.sizes.get(symbol, size) != size:
            raise KvRenameError(
                f"the layout file says {symbol}={layout.sizes[symbol]}, and --dim says {size}",
                hint="leave it out, or write the file again",
            )
    return apply_sizes(layout, sizes)


def check_size_symbols(sizes: Iterable[str], symbols: Sequence[str], prefix: str = "") -> None:
    """Check that each size is of a symbolic dimension of the buffers, if they have any.

    The prefix is the side that ``--dim`` gave the sizes for, for the message.

    Raises:
        KvRenameError: The buffers have symbols, and one with a size is not among them.
    """
    unknown = [symbol for symbol in sizes if symbol not in symbols]
    if unknown and symbols:
        fault = f"buffers have no such dimension; they have {format_list(symbols)}"
        hint = suggest_similar(unknown[0], symbols)
        raise KvRenameError(f"--dim {prefix}{unknown[0]}: {fault}", hint=hint)


def add_shared_findings(models: Sequence[KvModel], rules: Rules) -> list[KvModel]:
    """Return the models with what only all of them together show among their findings.

    Which other model fills a buffer does not matter here.
    """
    apart = [model._replace(is_apart=True) for model in models]
    shared = check_models_together(apart, rules, Request(check=True))
    return [
        model._replace(findings=(*model.findings, *found))
        for model, found in zip(models, shared, strict=True)
    ]


def _refuse_other_profiles(models: Sequence[KvModel], selected: Sequence[KvModel]) -> None:
    """Raise :class:`ModelError` for a model whose buffers only another profile knows.

    Without them the layout would be that of a part of the models, and nobody would notice.
    """
    for model in models if selected else ():
        finding = next((each for each in model.findings if each.code == "KV001"), None)
        if finding is not None:
            message = f"is not the same model as {selected[0].path}: {finding.message}"
            raise ModelError(message, path=model.path, hint=finding.hint)


def _is_json_file(path: Path) -> bool:
    """Return whether a plain file begins like a JSON object, as no ONNX model does."""
    status = read_status(path)
    if status is None or stat.S_ISDIR(status.st_mode):
        return False
    with open_file(path) as file:
        return file.read(0, 64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def group_layout_models(models: Sequence[KvModel]) -> list[tuple[KvModel, ...]]:
    """Return the models of each layout: one model alone, or the windows of one.

    All stages of one export have one layout, that of the last stage that has all their layers.
    Models without buffers are in none.
    """
    models = [model for model in models if model.pairs]
    groups = sorted(group_parts(models), key=lambda group: _STAGE_PRECEDENCE.index(group.stage))
    sets: list[tuple[int, ...]] = []
    for group in groups:
        merged_alone = [(index,) for index in group.part_indexes]
        sets += merged_alone if group.stage == MERGED else [group.part_indexes]
    alone = [(index,) for index, model in enumerate(models) if model.part is None]
    found = [tuple(models[index] for index in indexes) for indexes in sets]
    if not alone and _is_single_export(groups):
        all_layers = _list_layers(models)
        for each in found:
            if _list_layers(each) == all_layers:
                return [each]
    in_order = sorted((*alone, *sets), key=min)
    return [tuple(models[index] for index in indexes) for indexes in in_order]


def _list_layers(models: Iterable[KvModel]) -> set[int]:
    return {pair.layer for model in models for pair in model.pairs}


def _build_several_models_error(models: Sequence[KvModel]) -> ModelError:
    """Return the error for several unrelated models.

    It is about the one with the most buffers that go in and out, which is the decoder of an
    encoder and a decoder, and of several decoders the one that runs every step.
    """
    models = [model for model in models if model.pairs]
    chosen = max(models, key=_count_retained)
    other = next(model for model in models if model is not chosen)
    return ModelError(
        f"is one of {len(models):,} models, as is {other.path}; a layout is that of one model",
        path=chosen.path,
        hint=f"pass one of them, such as {quote_path(chosen.path)}; windows of one model need "
        "the names that they were exported with",
    )


def _count_retained(model: KvModel) -> int:
    return sum(pair.input is not None and pair.output is not None for pair in model.pairs)


def _is_single_export(groups: Sequence[PartGroup]) -> bool:
    """Return whether these are stages of one export, by their directories and names."""
    models = {group.model_name for group in groups if group.model_name}
    roots = sorted((group.root for group in groups), key=len)
    return (
        len({group.stage for group in groups}) == len(groups)
        and len(models) <= 1
        and all(_is_within(inner, outer) for outer, inner in pairwise(roots))
    )


def _is_within(inner: str, outer: str) -> bool:
    return inner == outer or not outer or inner.startswith(outer.rstrip("/") + "/")
