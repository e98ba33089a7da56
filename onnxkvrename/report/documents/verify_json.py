"""What is proved about models as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.layout.updates import UpdateKind
from onnxkvrename.model.signature import Dim
from onnxkvrename.records import Document, fill_record
from onnxkvrename.report.target_text import TargetVerdict
from onnxkvrename.rules.plan import KvPair, UnchangedName
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.verification.dataflow import BufferFlow, FlowVerdict
from onnxkvrename.verification.provenance import NodeLocation
from onnxkvrename.verification.renamed_from import RenameProof
from onnxkvrename.verification.verify import VerifiedModel


class Pair(NamedTuple):
    """A KV buffer, and how its output is made from its input.

    Attributes:
        layer: The number of the layer.
        buffer: The part of the name that says what is in the buffer, such as past_key.
        kind: The kind of the buffer, in the words of the rules.
        scope: The part of the name before the last slash, as in layerwise exports; usually empty.
        input: The graph input of the pair; `None` if it is missing.
        output: The retained output of the pair; `None` if it is missing.
        verdict: `None` for a pair with one side missing, or of a model that was not traced.
        update: How the retained output is made from its input.
        update_axis: For append and delta the axis with another size, `None` if it is not known.
        updated_by: The node that writes to the buffer last, or where its trace ended.
    """

    layer: int
    buffer: str
    kind: str
    scope: str
    input: str | None
    output: str | None
    verdict: FlowVerdict | None
    update: UpdateKind | None
    update_axis: int | None
    updated_by: NodeLocation | None


class Model(NamedTuple):
    """What is proved about one model.

    Attributes:
        path: The path, as given.
        verified: Whether no error was found; warnings are not errors.
        pairs: The KV pairs of the model.
        kept: Inputs and outputs of the model whose names stay, each with the reason.
        findings: What is, or may be, wrong.
        renamed_from: The comparison with the model before its names were changed; `None` if it
            was not asked for.
        error: Why this model could not be read; `None` otherwise.
    """

    path: str
    verified: bool
    pairs: tuple[Pair, ...]
    kept: tuple[UnchangedName, ...]
    findings: tuple[Finding, ...]
    renamed_from: RenameProof | None
    error: KvRenameError | None


class Slot(NamedTuple):
    """An input and an output that the consumer selects as one buffer.

    Attributes:
        slot: The position in the consumer's order, from 0.
        input: The input that the consumer selects; `None` if there is none.
        output: The output that the consumer selects; `None` if there is none.
        layer: The layer; `None` for a value that is not a KV buffer.
        part: What is in the buffer, such as key or value; `None` likewise.
        kind: The kind of the buffer, in vLLM's words; `None` likewise.
        dtype: The element type, in ONNX's words.
        shape: As in the graph; `None` where the rank is not known.
    """

    slot: int
    input: str | None
    output: str | None
    layer: int | None
    part: str | None
    kind: str | None
    dtype: str
    shape: tuple[Dim, ...] | None


class ModelSet(NamedTuple):
    """A model, or the windows of one, as a consumer uses it.

    Attributes:
        models: The paths, in the order of their layers.
        ready: Whether the consumer can use it: no model has an error.
        ordered: Whether the consumer can read an order in the names; if not, slots are as in the
            graph.
        hybrid: Whether what is selected has more than one shape or dtype.
        alternative: The consumer that is the same program with another setting, if that one can
            use what this one cannot.
        slots: What the consumer selects, in its order; inputs and outputs as it pairs them, by
            position or by name.
    """

    models: tuple[str, ...]
    ready: bool
    ordered: bool
    hybrid: bool
    alternative: str | None
    slots: tuple[Slot, ...]


class VerifyContent(NamedTuple):
    """What is proved about the models.

    Attributes:
        profile: The rules that identify KV names; `None` if the job could not be done.
        models: One entry for each model.
        target: The consumer that they were checked for; `None` if none was named.
        sets: What the consumer makes of them, one entry for each model or set of windows.
    """

    profile: ProfileChoice | None
    models: tuple[Model, ...]
    target: str | None = None
    sets: tuple[ModelSet, ...] = ()


DOCUMENT = Document("onnxkvrename.verify/1", "verify", VerifyContent(None, ()))


def describe_verified(
    models: Iterable[VerifiedModel],
    profile: ProfileChoice,
    target: str | None = None,
    verdicts: Iterable[TargetVerdict] = (),
) -> VerifyContent:
    """Return what was proved about models by a profile, and what a consumer makes of them."""
    sets = tuple(map(_describe_set, verdicts))
    return VerifyContent(profile, tuple(map(_describe_model, models)), target, sets)


def _describe_set(verdict: TargetVerdict) -> ModelSet:
    other = verdict.alternative
    return ModelSet(
        verdict.paths,
        verdict.is_ready,
        verdict.selection.is_ordered,
        verdict.is_hybrid,
        None if other is None else other.name,
        tuple(_list_slots(verdict)),
    )


def _list_slots(verdict: TargetVerdict) -> Iterator[Slot]:
    layout = verdict.checked.layout
    buffers = {name: buffer for buffer in layout.buffers for name in buffer.names}
    for number, (source, result) in enumerate(verdict.selection.value_pairs):
        value = source or result
        assert value is not None
        buffer = buffers.get(value.name)
        yield Slot(
            number,
            source.name if source else None,
            result.name if result else None,
            buffer.layer if buffer else None,
            buffer.part if buffer else None,
            buffer.kind if buffer else None,
            value.dtype,
            value.shape,
        )


def _describe_model(verified: VerifiedModel) -> Model:
    report = verified.report
    flows = {flow.pair: flow for flow in verified.flows}
    return fill_record(
        Model,
        report,
        verified=not report.failed,
        pairs=tuple(_describe_pair(pair, flows.get(pair)) for pair in report.pairs),
        kept=report.unchanged_names,
        renamed_from=verified.rename_proof,
    )


def _describe_pair(pair: KvPair, flow: BufferFlow | None) -> Pair:
    return fill_record(
        Pair,
        pair,
        input=None if pair.input is None else pair.input.old_name,
        output=None if pair.output is None else pair.output.old_name,
        verdict=None if flow is None else flow.verdict,
        update=None if flow is None else flow.update.kind,
        update_axis=None if flow is None else flow.update.axis,
        updated_by=None if flow is None else flow.updated_by,
    )
