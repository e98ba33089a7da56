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
from onnxkvrename.findings import Finding, as_errors, listed
from onnxkvrename.layout import dims as sizing
from onnxkvrename.layout import layout as layouts
from onnxkvrename.layout import manifest
from onnxkvrename.layout.layout import Layout
from onnxkvrename.model import file as onnxfile
from onnxkvrename.model import metadata as stamps
from onnxkvrename.model import occurrences as places
from onnxkvrename.model import proto_reader as messages
from onnxkvrename.model.signature import Signature
from onnxkvrename.rules import checks as checking
from onnxkvrename.rules import find_models as discovery
from onnxkvrename.rules import plan as planning
from onnxkvrename.rules import windows
from onnxkvrename.rules.plan import Plan, Wish
from onnxkvrename.rules.profile import MERGED, PREFIXED, WINDOW, Rules
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.rules.windows import Group, Part, Seen
from onnxkvrename.sidecars import specializations
from onnxkvrename.sidecars import yaml_text as yamltext
from onnxkvrename.sidecars.formats import custom_io as customio
from onnxkvrename.sidecars.text_edit import Unreadable
from onnxkvrename.storage import read as files

_STAGES = (MERGED, PREFIXED, WINDOW)
"""The last one first: it stands for those before it."""
_LARGEST = 1 << 26
"""Bytes of a manifest, far beyond any."""


class Known(NamedTuple):
    """What is known beside the models: sizes of symbols, and files of a compile.

    ``sets`` is false for windows that shall not be held against each other.
    """

    sizes: Mapping[str, int] = MappingProxyType({})
    specializations: Path | None = None
    custom_io: Path | None = None
    sets: bool = True


class Gathered(NamedTuple):
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

    def with_findings(self, findings: Iterable[Finding]) -> Gathered:
        """The same, with more that was found of the layout, told with its first model."""
        first = next(iter(self.layout.models), None)
        more = tuple(findings)
        reports = (
            _judged(report._replace(findings=(*report.findings, *more)))
            if report.path == first
            else report
            for report in self.reports
        )
        return self._replace(reports=tuple(reports))

    def without(self, code: str) -> Gathered:
        """The same, as if nothing of this code had been found."""
        reports = (
            report._replace(findings=tuple(f for f in report.findings if f.code != code))
            for report in self.reports
        )
        return self._replace(reports=tuple(map(_judged, reports)))


class _Read(NamedTuple):
    """A model as it was read."""

    report: ModelReport
    signature: Signature
    plan: Plan
    part: Part | None
    stamp: str | None


def gather(
    paths: Sequence[Path], rules: Rules, known: Known | None = None, *, strict: bool = False
) -> Gathered:
    """The layout of one model or set, as it stands; nothing is written.

    Windows count in the order of their layers. Where a merged model is given
    beside its windows, it stands for them; a model without buffers, such as an
    encoder, is no part of the layout. Raises :class:`ModelError` for a model that
    cannot be read, and for models that are not one.
    """
    known = known or Known()
    read = [_read(job.model, rules) for job in discovery.find(paths)]
    seen = [
        Seen(
            tuple(value.name for value in one.signature.outputs),
            one.plan.pairs,
            one.part if known.sets else None,
        )
        for one in read
    ]
    further = windows.together(seen, rules, Wish(None), judge=True)
    chosen = _chosen(read, rules)
    layout = layouts.layout(
        [layouts.Source(one.report.path, one.signature, one.plan) for one in chosen]
    )
    wrong = _wrongly_stamped(chosen, layout, rules)
    reports = []
    for one, found in zip(read, further, strict=True):
        findings = (*one.report.findings, *found)
        if one.report.path in wrong:
            findings = (*findings, wrong[one.report.path])
        findings = as_errors(findings) if strict else findings
        reports.append(_judged(one.report._replace(findings=findings)))
    carried = {one.stamp for one in chosen}
    stamp = carried.pop() if len(carried) == 1 else None
    return Gathered(with_known(layout, known), tuple(reports), stamp)


def _wrongly_stamped(
    chosen: Sequence[_Read], layout: Layout, rules: Rules
) -> Mapping[str, Finding]:
    """KV621, by the models' paths; a window alone cannot tell what its set is stamped with."""
    if len(chosen) == 1 and windows.is_window(chosen[0].report.path, rules):
        return {}
    return layouts.wrongly_stamped(layout, {one.report.path: one.stamp for one in chosen})


def side(path: Path, rules: Rules, known: Known | None = None) -> Gathered:
    """The layout of what stands on one side of a hand-off: a model, a set, or a manifest of one.

    A manifest is told by its content. Its sizes stand, its dtypes unless ``known`` says
    otherwise, and its findings are those of the model that it was made from. Raises
    :class:`ModelError` as :func:`gather` does, and for a damaged manifest.
    """
    if not _is_json(path):
        return gather([path], rules, known)
    found = manifest.read(files.read_text(path, _LARGEST), str(path))
    report = ModelReport(str(path), str(path), "unchanged", findings=found.findings)
    return Gathered(with_known(found.layout, known or Known()), (_judged(report),), found.stamp)


def with_known(layout: Layout, known: Known) -> Layout:
    """The same layout, with the sizes and dtypes that are known from elsewhere.

    What a manifest says of sizes stands: others fill in what it does not say.

    A size given by hand comes before that of a file. Raises :class:`ModelError`
    for files of another form or another model, and :class:`KvRenameError` for
    a symbol on whose size specializations do not agree, and for one that the
    layout does not have.
    """
    symbols = layout.symbols
    check_sizes(known.sizes, symbols)
    for symbol, size in known.sizes.items():
        if layout.sizes.get(symbol, size) != size:
            said = f"{symbol}={layout.sizes[symbol]}, and --dim says {size}"
            hint = "leave it out, or write the manifest again"
            raise KvRenameError(f"a manifest says {said}", hint=hint)
    sizes = {**_specialized(layout, known), **known.sizes, **layout.sizes}
    layout = layouts.with_sizes(layout, {name: sizes[name] for name in symbols if name in sizes})
    if known.custom_io is None:
        return layout
    try:
        return layouts.with_dtypes(layout, _dtypes(known.custom_io))
    except ModelError as error:
        raise ModelError(error.message, path=str(known.custom_io), hint=error.hint) from None


def check_sizes(sizes: Iterable[str], symbols: Sequence[str], option: str = "--dim") -> None:
    """Raise :class:`KvRenameError` for a size that was given in vain; without symbols all are."""
    strange = [symbol for symbol in sizes if symbol not in symbols]
    if strange and symbols:
        close = difflib.get_close_matches(strange[0], symbols, n=1)
        said = f"buffers have no such dimension; they have {listed(symbols)}"
        hint = f"did you mean {close[0]}?" if close else None
        raise KvRenameError(f"{option} {strange[0]}: {said}", hint=hint)


def _specialized(layout: Layout, known: Known) -> Mapping[str, int]:
    """Sizes from specializations. What they do not agree on matters, unless it is the batch."""
    if known.specializations is None:
        return {}
    path = str(known.specializations)
    found = specializations.read(files.read_text(known.specializations), path)
    needed = set(sizing.symbols(buffer.state for buffer in layout.buffers)) - known.sizes.keys()
    for symbol in sorted(needed & found.differing.keys()):
        said = " and ".join(map(str, found.differing[symbol]))
        hint = f"--dim {symbol}=SIZE says which"
        raise KvRenameError(f"has {symbol} as {said}", path=path, hint=hint)
    for symbol in sorted(needed):
        if found.sizes.get(symbol, 1) < 1:
            raise KvRenameError(
                f"has {symbol} as {found.sizes[symbol]}", path=path, hint="a size is 1 or more"
            )
    return {symbol: size for symbol, size in found.sizes.items() if size > 0}


def _judged(report: ModelReport) -> ModelReport:
    return report._replace(status="failed" if report.failed else "unchanged")


def _is_json(path: Path) -> bool:
    """Whether a plain file begins as a JSON object does, which no ONNX model does."""
    if os.path.isdir(path) or not os.path.exists(path):
        return False
    with files.opened(path) as file:
        return file.read(0, 64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def _read(path: Path, rules: Rules) -> _Read:
    with onnxfile.opened(path) as model:
        plan = planning.as_it_stands(model.signature, rules)
        ends = {end.old for pair in plan.pairs for end in pair.ends}
        survey = places.survey(model.source, {*ends, *plan.names.values()})
        findings = tuple(checking.check(model.signature, plan, survey.uses(plan.names)))
        export = partial(messages.export, model.source)
        part = windows.part(path.as_posix(), model.signature, plan.pairs, rules, export)
        stamp = stamps.read(model.source)
    report = ModelReport(str(path), str(path), "unchanged", plan.pairs, plan.kept, findings)
    return _Read(report, model.signature, plan, part, stamp)


def _chosen(read: Sequence[_Read], rules: Rules) -> tuple[_Read, ...]:
    """The models that make up the layout: all with buffers, or those that stand for the rest."""
    having = [one for one in read if one.plan.pairs]
    parts = [one.part for one in having if one.part is not None]
    if len(parts) < len(having):
        return _one(having)
    groups = sorted(windows.group(parts, rules), key=lambda group: _STAGES.index(group.stage))
    layers = [{pair.layer for pair in one.plan.pairs} for one in having]
    every = set().union(*layers)
    for group in groups if _stages_of_one(groups) else ():
        files = [(at,) for at in group.parts] if group.stage == MERGED else [group.parts]
        for chosen in files:
            if set().union(*(layers[at] for at in chosen)) == every:
                return tuple(having[at] for at in chosen)
    return _one(having)


def _one(having: Sequence[_Read]) -> tuple[_Read, ...]:
    """The only model. Raises :class:`ModelError` for more that do not belong together."""
    if len(having) > 1:
        first, second = having[0].report.path, having[1].report.path
        raise ModelError(
            f"is another model than {first}",
            path=second,
            hint="give one, or the windows of one, called as they were exported",
        )
    return tuple(having)


def _stages_of_one(groups: Sequence[Group]) -> bool:
    """Whether these are stages of one export, as their places and names tell."""
    models = {group.model for group in groups if group.model}
    roots = sorted((group.root for group in groups), key=len)
    return (
        len({group.stage for group in groups}) == len(groups)
        and len(models) <= 1
        and all(_within(inner, outer) for outer, inner in pairwise(roots))
    )


def _within(inner: str, outer: str) -> bool:
    return inner == outer or not outer or inner.startswith(outer.rstrip("/") + "/")


def _dtypes(path: Path) -> Mapping[str, str]:
    try:
        tree = yamltext.parse(files.read_text(path))
        return dict(customio.dtypes(tree)) if tree is not None else {}
    except Unreadable as error:
        raise ModelError(
            f"cannot be taken as custom I/O: it {error}",
            path=str(path),
            hint=error.hint or f"its form: {customio.FORM}",
        ) from None
