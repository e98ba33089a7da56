"""Tell whether a consumer can use verified models: one verdict for each model or set of windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.findings import UNKNOWN_TRANSFER
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import Selection, find_distinct_types, select_values
from onnxkvrename.handoff.target import CheckedSet, TargetCheck
from onnxkvrename.report.layout_text import format_missing_windows
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.text import format_count


class TargetVerdict(NamedTuple):
    """What a consumer makes of a model, or of the windows of one.

    Attributes:
        checked: The models with their layout.
        selection: What the consumer selects, in its order.
        paths: The models.
        text: The verdict in a few words.
        is_ready: Whether the consumer can use them.
        alternative: The same program with another setting, which can use what this one cannot;
            ``None`` if none can, or if more is wrong with the models.
    """

    checked: CheckedSet
    selection: Selection
    paths: tuple[str, ...]
    text: str
    is_ready: bool
    alternative: Consumer | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether what is selected has more than one shape or dtype."""
        return len(find_distinct_types(self.checked.layout, self.selection.inputs)) > 1


def judge_target_check(
    check: TargetCheck, reports: Sequence[ModelReport]
) -> tuple[TargetVerdict, ...]:
    """Return the verdict on each model or set of windows.

    Args:
        check: What the consumer makes of them.
        reports: All models with their final findings, of which an error keeps a set from being
            ready, whether it is about the consumer or not.
    """
    pairs = zip(check.sets, check.alternatives, strict=True)
    return tuple(
        _judge_set(check.consumer, each, alternative, [reports[index] for index in each.indexes])
        for each, alternative in pairs
    )


def _judge_set(
    consumer: Consumer,
    checked: CheckedSet,
    alternative: Consumer | None,
    reports: Sequence[ModelReport],
) -> TargetVerdict:
    paths = tuple(report.path for report in reports)
    selection = select_values(checked.layout, consumer)
    errors = [f for report in reports for f in report.findings if f.severity == "error"]
    is_ready = not any(report.failed for report in reports)
    verdict = TargetVerdict(checked, selection, paths, "", is_ready)
    if is_ready:
        return verdict._replace(text=_describe_success(consumer, verdict))
    if {finding.code for finding in errors} == {UNKNOWN_TRANSFER}:
        return verdict._replace(text=f"not known whether {consumer.name} can use {_refer(paths)}")
    text = f"{consumer.name} cannot use {_refer(paths)}"
    own = {(finding.code, finding.name) for finding in checked.findings}
    if alternative is None or any((each.code, each.name) not in own for each in errors):
        return verdict._replace(text=text)
    setting = f"with {alternative.setting}" if alternative.setting else "without its setting"
    text += f"; {setting} it can (--target {alternative.name})"
    return verdict._replace(text=text, alternative=alternative)


def _refer(paths: Sequence[str]) -> str:
    return "it" if len(paths) == 1 else "them"


def _describe_success(consumer: Consumer, verdict: TargetVerdict) -> str:
    buffers = format_count(len(verdict.selection.inputs), "buffer")
    every = "all " if len(verdict.selection.inputs) > 1 else ""
    hybrid = ", of different shapes or dtypes" if verdict.is_hybrid else ""
    return (
        f"ready for {consumer.name}: it will select, pair and move {every}{buffers}{hybrid} "
        f"(static check; not run on a device){format_missing_windows(verdict.checked.layout)}"
    )


def format_slots(verdict: TargetVerdict) -> Iterator[str]:
    """Yield each selected input in the consumer's order, with the output that goes back into it."""
    for number, pair in enumerate(verdict.selection.value_pairs):
        source, result = (side.name if side else "nothing" for side in pair)
        yield f"{number}: {source} <- {result}"


def group_target_verdicts(verdicts: Iterable[TargetVerdict]) -> list[list[TargetVerdict]]:
    """Return groups of verdicts with the same text."""
    groups: dict[str, list[TargetVerdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.text, []).append(verdict)
    return [*groups.values()]
