"""What is in a model file, at a glance. Weights are counted and never read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from onnxkvrename.errors import KvRenameError, RulesError
from onnxkvrename.findings import Finding, document, error_values
from onnxkvrename.layout import layout as layouts
from onnxkvrename.layout.kinds import Kind, dtype_of, kind_of, shape_of
from onnxkvrename.model import external_data as externaldata
from onnxkvrename.model import file as onnxfile
from onnxkvrename.model import metadata as stamps
from onnxkvrename.model import occurrences as places
from onnxkvrename.model import proto_reader as messages
from onnxkvrename.model import statistics as weighing
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.model.file import Model
from onnxkvrename.model.proto_reader import Reference
from onnxkvrename.model.signature import Dim, Export
from onnxkvrename.model.statistics import Weight
from onnxkvrename.rules import checks as checking
from onnxkvrename.rules import plan as planning
from onnxkvrename.rules import windows
from onnxkvrename.rules.plan import Kept, Pair, Plan
from onnxkvrename.rules.profile import Rules

SCHEMA = "onnxkvrename.inspect/1"
State = Literal["plain", "token", "half", "missing", "broken"]
"""``half`` carries a token on one side only; ``broken`` has an error of its own.

A ``missing`` buffer is one that its layer should have.
"""


class DataUse(NamedTuple):
    """A file beside the model; ``size`` is in bytes, ``None`` where it cannot be used."""

    location: str
    size: int | None


class Buffer(NamedTuple):
    """A KV buffer, with the names of its two sides as they stand."""

    layer: int
    buffer: str
    scope: str
    kind: Kind
    state: State
    dtype: str
    shape: tuple[Dim, ...] | None
    input: str | None
    output: str | None


class Group(NamedTuple):
    """Buffers that are of one kind, dtype and shape in the same layers."""

    kind: Kind
    buffers: tuple[str, ...]
    dtype: str
    shape: tuple[Dim, ...] | None
    layers: tuple[int, ...]


class Stamp(NamedTuple):
    """The digest of a layout that a model carries, and whether its graph has that layout.

    Of a window that is not known: the stamp is its set's.
    """

    digest: str
    holds: bool | None


class Anatomy(NamedTuple):
    """What is in one model; of one that cannot be read only ``path`` and ``error``.

    ``size`` is that of the file in bytes; ``files`` are those beside it with the
    rest of its weights. ``tokens`` are those found, each with the number of
    names that carry it, of ``names`` that could.
    """

    path: str
    size: int = 0
    export: Export | None = None
    weight: Weight = Weight()
    files: tuple[DataUse, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    tokens: tuple[tuple[str, int], ...] = ()
    names: int = 0
    kept: tuple[Kept, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None
    stamp: Stamp | None = None

    @property
    def external(self) -> int:
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


def inspect(path: Path, rules: Rules) -> Anatomy:
    """What is in the model at ``path``; what keeps it from being read is its ``error``.

    Raises :class:`RulesError` where the rules make names that could not be undone.
    """
    try:
        with onnxfile.opened(path) as model:
            return dissect(model, rules)
    except RulesError:
        raise
    except KvRenameError as error:
        return Anatomy(str(path), error=error)


def dissect(model: Model, rules: Rules) -> Anatomy:
    """What is in an open model.

    Checked is the model as it stands: with the token that it carries as the one
    wished for. Raises :class:`ModelError` for bytes that are no model, and
    :class:`RulesError` as :func:`inspect` does.
    """
    plan = planning.as_it_stands(model.signature, rules)
    carried = {end.old for pair in plan.pairs for end in pair.ends}
    survey = places.survey(model.source, {*carried, *plan.names.values()})
    uses = survey.uses(plan.names)
    files, faults = _data(survey.references, model.file.path)
    stamp, void = _stamp(model, plan, rules)
    findings = (*checking.check(model.signature, plan, uses), *faults, *void)
    return Anatomy(
        path=str(model.file.path),
        size=model.file.size,
        export=messages.export(model.source),
        weight=weighing.weigh(model.source),
        files=files,
        buffers=tuple(_buffers(plan, _broken(plan, findings))),
        tokens=tuple(plan.tokens.most_common()),
        names=len(carried),
        kept=plan.kept,
        findings=findings,
        stamp=stamp,
    )


def groups(buffers: Iterable[Buffer]) -> tuple[Group, ...]:
    """The buffers that are there, by kind, dtype and shape, in the order of their layers."""
    found: dict[tuple[Kind, str, str, tuple[Dim, ...] | None], list[int]] = {}
    for item in buffers:
        if item.state != "missing":
            key = (item.kind, item.buffer, item.dtype, item.shape)
            found.setdefault(key, []).append(item.layer)
    alike: dict[tuple[Kind, str, tuple[Dim, ...] | None, tuple[int, ...]], list[str]] = {}
    for (kind, buffer, dtype, shape), layers in found.items():
        alike.setdefault((kind, dtype, shape, tuple(layers)), []).append(buffer)
    return tuple(
        Group(kind, tuple(names), dtype, shape, layers)
        for (kind, dtype, shape, layers), names in alike.items()
    )


def exit_code(found: Iterable[Anatomy]) -> int:
    """0 nothing wrong, 1 a finding of severity error, 2 a model that cannot be read."""
    models = tuple(found)
    if any(model.error is not None for model in models):
        return 2
    return int(any(model.failed for model in models))


def _stamp(model: Model, plan: Plan, rules: Rules) -> tuple[Stamp | None, tuple[Finding, ...]]:
    """The stamp of a model, and KV621 where it does not hold."""
    digest, path = stamps.read(model.source), model.file.path
    if digest is None:
        return None, ()
    if windows.is_window(path.as_posix(), rules):
        return Stamp(digest, None), ()
    void = layouts.void_stamp(layouts.Source(str(path), model.signature, plan), digest)
    return Stamp(digest, void is None), () if void is None else (void,)


def _broken(plan: Plan, findings: Iterable[Finding]) -> frozenset[str]:
    """The names that an error is about which lies in their pair itself."""
    wrong = {f.name for f in findings if f.severity == "error" and f.code.startswith("KV1")}
    return frozenset(wrong | {taken for name, taken in plan.doubles if name in wrong})


def _buffers(plan: Plan, broken: frozenset[str]) -> Iterator[Buffer]:
    """The pairs, and in their places those that their layers lack."""
    layers: dict[tuple[int, str], list[Pair]] = {}
    for pair in plan.pairs:
        layers.setdefault((pair.layer, pair.kind), []).append(pair)
    for (layer, kind), pairs in layers.items():
        there = {pair.buffer for pair in pairs}
        for part in plan.parts[kind]:
            if part not in there:
                told = kind_of(pairs[0], pairs)
                scope = pairs[0].scope
                yield Buffer(layer, part, scope, told, "missing", "", None, None, None)
            for pair in pairs:
                if pair.buffer == part:
                    yield _buffer(pair, kind_of(pair, pairs), broken)


def _buffer(pair: Pair, kind: Kind, broken: frozenset[str]) -> Buffer:
    return Buffer(
        layer=pair.layer,
        buffer=pair.buffer,
        scope=pair.scope,
        kind=kind,
        state=_state(pair, broken),
        dtype=dtype_of(pair),
        shape=shape_of(pair),
        input=None if pair.input is None else pair.input.old,
        output=None if pair.output is None else pair.output.old,
    )


def _state(pair: Pair, broken: frozenset[str]) -> State:
    if any(end.old in broken for end in pair.ends):
        return "broken"
    tokens = {end.token for end in pair.ends}
    if len(tokens) > 1:
        return "half"
    return "token" if tokens != {""} else "plain"


def _data(
    references: Iterable[Reference], model: Path
) -> tuple[tuple[DataUse, ...], tuple[Finding, ...]]:
    """The data files with their sizes, and what is wrong with any."""
    sizes: dict[str, int | None] = {}
    faults = []
    for reference in references:
        sizes.setdefault(reference.location, None)
        for found in externaldata.locate([reference], model):
            if isinstance(found, DataFile):
                sizes[reference.location] = found.size
            else:
                faults.append(found)
    files = tuple(DataUse(location, size) for location, size in sizes.items() if location)
    return files, tuple(faults)


def as_json(found: Iterable[Anatomy], code: int, fault: KvRenameError | None = None) -> str:
    """One document, held against ``schemas/inspect-1.json`` by the tests."""
    return document(SCHEMA, "inspect", code, fault, models=[as_dict(one) for one in found])


def as_dict(anatomy: Anatomy) -> dict[str, Any]:
    """A model for programs: every key is always there, sizes are in bytes."""
    made, weight = anatomy.export, anatomy.weight
    return {
        "path": anatomy.path,
        "size": anatomy.size,
        "export": None
        if made is None
        else {
            "ir_version": made.ir_version,
            "producer": made.producer,
            "producer_version": made.producer_version,
            "opsets": [{"domain": domain, "version": version} for domain, version in made.opsets],
        },
        "nodes": weight.nodes,
        "functions": list(weight.functions),
        "weights": {
            "inline_tensors": weight.inline,
            "inline_bytes": weight.size,
            "external_tensors": weight.external,
            "external_bytes": anatomy.external,
            "files": [{"location": file.location, "bytes": file.size} for file in anatomy.files],
        },
        "layers": list(anatomy.layers),
        "tokens": [{"token": token, "names": count} for token, count in anatomy.tokens],
        "names": anatomy.names,
        "stamp": None
        if anatomy.stamp is None
        else {"kv_layout_sha256": anatomy.stamp.digest, "holds": anatomy.stamp.holds},
        "buffers": [buffer._asdict() for buffer in anatomy.buffers],
        "kept": [kept._asdict() for kept in anatomy.kept],
        "findings": [found._asdict() for found in anatomy.findings],
        "error": error_values(anatomy.error),
    }
