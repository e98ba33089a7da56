"""A rename as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, get_args

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.records import Document, fill_record
from onnxkvrename.rules.plan import KvPair, PairSide, UnchangedName
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.rules.results import ModelReport, Report, SidecarReport, Status

_NOTHING: Mapping[str, str] = {}


class Change(NamedTuple):
    """A name that changes, or stays.

    Attributes:
        old: The name before.
        new: The name after.
    """

    old: str
    new: str


class Pair(NamedTuple):
    """A KV buffer: an input, and the retained output that carries it to the next step.

    Attributes:
        layer: The number of the layer.
        buffer: The part of the name that says what is in the buffer, such as past_key.
        kind: The kind of the buffer, in the words of the rules.
        scope: The part of the name before the last slash, as in layerwise exports; usually empty.
        input: The graph input of the pair, before and after.
        output: The retained output of the pair, before and after.
    """

    layer: int
    buffer: str
    kind: str
    scope: str
    input: Change | None
    output: Change | None


class Model(NamedTuple):
    """What became of one model.

    Attributes:
        path: The path, as given.
        output: Where the result is, or would be; equal to `path` for a rename in place.
        status: What happened to the model, or would happen.
        pairs: The KV pairs of the model.
        kept: Inputs and outputs of the model whose names stay, each with the reason.
        checked_for: The consumer for which the result was checked (`--target`), with the findings
            as its answer; `None` if it was not.
        proved: How many buffers the graph of the result was shown to retain (`--verify`); `None`
            without it.
        findings: What is, or may be, wrong.
        pending: The names that `--check` found, in a sentence; `None` if there is none.
        error: Why this model could not be read or written; `None` otherwise.
    """

    path: str
    output: str
    status: Status
    pairs: tuple[Pair, ...]
    kept: tuple[UnchangedName, ...]
    checked_for: str | None
    proved: int | None
    findings: tuple[Finding, ...]
    pending: str | None
    error: KvRenameError | None


class RenameContent(NamedTuple):
    """What onnxkvrename did, or would do.

    Attributes:
        profile: The rules that identify KV names; `None` if the job could not be done.
        models: One entry for each model, in the order of the command line.
        texts: Text files that go with the models, such as the parameters of an export.
        summary: The number of models with each status.
        fix: The command that renames what `--check` found; `None` if there is nothing, or if a
            finding has another fix.
    """

    profile: ProfileChoice | None
    models: tuple[Model, ...]
    texts: tuple[SidecarReport, ...]
    summary: Mapping[Status, int]
    fix: str | None


DOCUMENT = Document(
    "onnxkvrename.report/1",
    "rename",
    RenameContent(None, (), (), dict.fromkeys(get_args(Status), 0), None),
)


def describe_report(
    report: Report, pending: Mapping[str, str] = _NOTHING, fix: str | None = None
) -> RenameContent:
    """Return what became of models and sidecars.

    Args:
        report: What became of them.
        pending: What ``--check`` found, by the path of the model.
        fix: The command that renames it.
    """
    counts = Counter(model.status for model in report.models)
    return RenameContent(
        report.profile,
        tuple(_describe_model(model, pending.get(model.path)) for model in report.models),
        report.sidecars,
        {status: counts[status] for status in get_args(Status)},
        fix,
    )


def _describe_model(model: ModelReport, pending: str | None) -> Model:
    return fill_record(
        Model,
        model,
        pairs=tuple(map(_describe_pair, model.pairs)),
        kept=model.unchanged_names,
        checked_for=model.consumer or None,
        pending=pending,
    )


def _describe_pair(pair: KvPair) -> Pair:
    sides = {"input": _describe_side(pair.input), "output": _describe_side(pair.output)}
    return fill_record(Pair, pair, **sides)


def _describe_side(side: PairSide | None) -> Change | None:
    return None if side is None else Change(side.old_name, side.new_name)
