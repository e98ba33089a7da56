"""Check models for the consumer that will use them: each model, and the windows of one together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, promote_to_errors
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import check_consumer, find_owning_model
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.name_checks import NAMES_HINT
from onnxkvrename.handoff.worker import rename_for_consumer
from onnxkvrename.layout.layout import Layout, build_layout
from onnxkvrename.layout.updates import Updates
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import MERGED
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.windows import group_parts


class CheckedSet(NamedTuple):
    """Models that a consumer uses as one, and what is wrong with them.

    Attributes:
        indexes: The models, by their positions among all that were checked.
        layout: Their buffers as the consumer sees them.
        findings: What the consumer cannot use, or would damage.
    """

    indexes: tuple[int, ...]
    layout: Layout
    findings: tuple[Finding, ...]

    def list_own_findings(self) -> Iterator[tuple[int, Finding]]:
        """Yield each finding after the position of the model that it is about."""
        for finding in self.findings:
            owner = self.layout.models.index(find_owning_model(self.layout, finding.name))
            yield self.indexes[owner], finding


class TargetCheck(NamedTuple):
    """Models with what a consumer makes of them.

    Attributes:
        consumer: The consumer.
        sets: Those with buffers, each model or set of windows for itself.
        alternatives: For each set the same program with another setting, if that one can use
            what the consumer cannot.
        refused: Why models have no layout, by their positions.
    """

    consumer: Consumer
    sets: tuple[CheckedSet, ...]
    alternatives: tuple[Consumer | None, ...]
    refused: Mapping[int, ModelError]


def check_target(
    models: Sequence[KvModel],
    updates: Mapping[str, Updates],
    rules: Rules,
    rename: Request,
    *,
    strict: bool,
) -> TargetCheck:
    """Check whether a consumer can use models as they are, and what would fail.

    Args:
        models: The models.
        updates: How their buffers are updated, by path and by output.
        rules: The rules that recognize KV names.
        rename: The rename for the consumer.
        strict: Whether a warning is as bad as an error.

    Raises:
        KvRenameError: There is no such consumer.
    """
    consumer, full_transfer = load_consumer(rename.target or ""), rename.full_transfer
    refused = find_refused(models)
    sets = [
        kept
        for group in group_for_consumer(models)
        if (kept := tuple(index for index in group if index not in refused))
        if any(models[index].pairs for index in kept)
    ]
    checked = check_sets(models, sets, updates, rules, rename)
    alternatives: list[Consumer | None] = []
    for each in checked:
        other = load_consumer(consumer.alternative) if consumer.alternative else None
        if other is not None and each.findings:
            found = tuple(check_consumer(each.layout, other, full_transfer=full_transfer))
            found = promote_to_errors(found) if strict else found
            other = other if all(finding.severity != "error" for finding in found) else None
        alternatives.append(other if each.findings else None)
    return TargetCheck(consumer, tuple(checked), tuple(alternatives), refused)


def find_refused(models: Iterable[KvModel]) -> dict[int, ModelError]:
    """Return why models have no layout, by their positions: two pairs are the same buffer."""
    refused: dict[int, ModelError] = {}
    for index, model in enumerate(models):
        try:
            build_layout([model])
        except ModelError as error:
            refused[index] = error
    return refused


def check_sets(
    models: Sequence[KvModel],
    sets: Iterable[Sequence[int]],
    updates: Mapping[str, Updates],
    rules: Rules,
    rename: Request,
) -> list[CheckedSet]:
    """Check each set of models for a consumer.

    The models have the names that the consumer will see; a set is the indexes of those that it
    receives together. Updates are by the path of a model and the name of an output. Models of a
    set that have the same buffer are checked one by one: a finding about the set reports that
    already. The `rename` has the consumer as its target.

    Raises:
        ModelError: Two pairs of one model are the same buffer.
    """
    consumer = load_consumer(rename.target or "")
    checked = []
    pending = [tuple(indexes) for indexes in reversed(list(sets))]
    while pending:
        indexes = pending.pop()
        try:
            layout = build_layout([models[index] for index in indexes], updates)
        except ModelError:
            if len(indexes) < 2:
                raise
            pending += ((index,) for index in reversed(indexes))
            continue
        others = () if models[indexes[0]].part is None else _list_other_parts(models, indexes)
        layout = layout._replace(other_stages=others)
        own = rename
        model = models[indexes[0]]
        if len(indexes) == 1 and not (others or model.plan.feeds or model.needs):
            own = rename._replace(models=(Path(model.path),))
        findings = _check_layout(layout, consumer, rules, own)
        checked.append(CheckedSet(indexes, layout, findings))
    return checked


def _check_layout(
    layout: Layout, consumer: Consumer, rules: Rules, rename: Request
) -> tuple[Finding, ...]:
    """Return the findings about a layout, with a command for its names that is not refused.

    A rename for the consumer is refused if it cannot use the result; one that only adds its token
    is not. Suffixes change in the same rename.
    """
    check = partial(check_consumer, consumer=consumer, full_transfer=rename.full_transfer)
    findings = tuple(check(layout, rename=rename))
    if consumer.token and any(finding.code in ("KV601", "KV602") for finding in findings):
        renamed = rename_for_consumer(layout, consumer, rules)
        errors = {each.code for each in check(renamed) if each.severity == "error"}
        if errors - {"KV601", "KV602"}:
            rename = rename._replace(target=None, token=consumer.token, full_transfer=False)
        rename = rename._replace(normalize=rename.normalize or "KV602" in errors)
        findings = tuple(check(layout, rename=rename))
        if "KV601" in errors:  # with the token, too
            findings = tuple(
                each._replace(hint=NAMES_HINT) if each.code == "KV601" else each
                for each in findings
            )
    return findings


def _list_other_parts(models: Sequence[KvModel], indexes: Sequence[int]) -> tuple[str, ...]:
    """Return the windows and merged models beside those of a set, which are renamed with it."""
    return tuple(
        model.path
        for index, model in enumerate(models)
        if index not in indexes and model.part is not None and model.pairs
    )


def group_for_consumer(models: Sequence[KvModel]) -> list[tuple[int, ...]]:
    """Return the indexes of models that a consumer uses as one: windows together.

    A merged model that lacks layers of another one is a step on the way to that one, and
    no consumer takes it.
    """
    indexes = [index for index, model in enumerate(models) if model.part is not None]
    parts = [models[index] for index in indexes]
    sets: list[tuple[int, ...]] = [
        (index,) for index, model in enumerate(models) if model.part is None
    ]
    for group in group_parts(parts):
        members = group.part_indexes
        if group.stage != MERGED:
            sets.append(tuple(indexes[member] for member in members))
            continue
        layers = {member: {pair.layer for pair in parts[member].pairs} for member in members}
        sets += [
            (indexes[member],)
            for member in members
            if not any(layers[member] < other_layers for other_layers in layers.values())
        ]
    return sets
