"""Tell the states that a model computes with from the hidden states that look like them.

A linear state is decayed and added to. So is the hidden state that a window of a residual
network takes and returns. What is combined with a state may be computed without that state,
which what a residual block adds never is: then it is a state. Else its shape has to tell, and
what it is computed from.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.signature import Dim, Signature, Value
from onnxkvrename.verification.constants import SmallConstants
from onnxkvrename.verification.graph_bodies import ModelGraph, Operation
from onnxkvrename.verification.provenance import NodeLocation
from onnxkvrename.verification.tracing import (
    DependencyTransfer,
    Transfer,
    trace,
    trace_dependencies,
)

_COMBINING_OPS = frozenset(("Add", "Sub", "Sum", "Max", "Min", "Where", "ScatterND"))
_GATING_OPS = frozenset(("Mul", "Div", "Where", "ScatterND"))


@show_briefly
class StatePair(NamedTuple):
    """An input, and the output that is a later state of it.

    Attributes:
        input: The graph input.
        output: The graph output.
        update: How the output is made from the input.
        is_computed: Whether the model computes with the state on the way, as it decays a
            recurrent state.
        feeds_back: Whether the output is all of the next state in every step, so that it can go
            back into the input as it is.
        is_gated: Whether gates alone make the output from the input, as in a recurrent cell.
    """

    input: Value
    output: Value
    update: BufferUpdate
    is_computed: bool = False
    feeds_back: bool = True
    is_gated: bool = False


class LoneState(NamedTuple):
    """An output that looks like a later state of an input.

    Attributes:
        input: The name of the input.
        output: The name of the output.
        reason: Why it is not proved to be one.
    """

    input: str
    output: str
    reason: str


def drop_unread_values(
    pairs: Sequence[StatePair], graph: ModelGraph, signature: Signature
) -> list[StatePair]:
    """Return the pairs without inputs that are only made into an output.

    Masks, biases and features of a picture are joined to something or computed with, and so is
    a state. But another output is computed from a state, and what is joined to it or combined
    with it is new in each step, not constants only. What is passed through needs only the first,
    or the type of a state that was found: an encoder's output that the decoder returns as it is,
    and does not read, is not a state.

    """
    if all(pair.update.kind == "once" for pair in pairs):
        return list(pairs)
    weights = graph.main.constants
    inputs = list(dict.fromkeys(v.name for v in signature.inputs if v.name not in weights))
    outputs = [value.name for value in signature.outputs]
    made_of = trace_dependencies(graph, inputs, outputs)
    in_any = in_several = 0
    for bits in made_of:
        in_several |= in_any & bits
        in_any |= bits
    by_output = dict(zip(outputs, made_of, strict=True))
    numbers = {name: number for number, name in enumerate(inputs)}

    def is_state(pair: StatePair) -> bool:
        number = numbers[pair.input.name]
        is_read = bool(in_several >> number & 1)
        if by_output[pair.output.name] == 1 << number:  # at most constants are written to it
            is_once = pair.update.kind == "once"
            return not pair.is_computed and (is_read if is_once else pair.update.kind == "inplace")
        return pair.update.kind == "once" or is_read

    types = {(pair.input.dtype, pair.input.shape) for pair in pairs if is_state(pair)}
    return [
        pair
        for pair in pairs
        if is_state(pair)
        or (pair.update.kind == "once" and (pair.input.dtype, pair.input.shape) in types)
    ]


def drop_hidden_states(
    pairs: Sequence[StatePair], graph: ModelGraph, signature: Signature
) -> list[StatePair]:
    """Return the pairs without what comes in, is added to, and goes out again.

    A pair that is computed with stays if what it is combined with is computed without it and is
    new in each step, if something scales or masks it, which a bias is not, and if it is not laid
    out like token ids. Else the input must have a fixed size on each axis but the first, must
    not be laid out like another input, unless it is gated, and must not be both what all other
    states are computed from and computed from all of them.

    """
    computed = [pair for pair in pairs if pair.is_computed]
    if not computed:
        return list(pairs)
    states = {pair.input.name for pair in pairs}
    others = [value for value in signature.inputs if value.name not in states]
    positions = set(_list_layouts(value for value in others if _is_integer(value)))
    affine = _find_affine_states(computed, others, graph)
    affine -= {pair.input.name for pair in computed if _has_positions(pair, positions)}
    layouts = set(_list_layouts(others))
    kept = [
        pair
        for pair in pairs
        if not pair.is_computed
        or pair.input.name in affine
        or (
            _has_state_shape(pair)
            and (pair.is_gated or (pair.input.shape or ())[:2] not in layouts)
        )
    ]
    unclear = {pair.input.name for pair in kept if pair.is_computed} - affine
    hubs = _find_hubs(kept, graph) if unclear else frozenset()
    return [pair for pair in kept if pair.input.name not in unclear & hubs]


def _has_state_shape(pair: StatePair) -> bool:
    """Return whether each axis but the first has a fixed size: none is of positions."""
    shape = pair.input.shape
    return shape is not None and all(isinstance(dim, int) for dim in shape[1:])


def _has_positions(pair: StatePair, layouts: Container[tuple[Dim, ...]]) -> bool:
    """Return whether an input has one vector for each new position, as logits and masks have."""
    shape = pair.input.shape or ()
    return len(shape) > 1 and not isinstance(shape[1], int) and shape[:2] in layouts


def _is_integer(value: Value) -> bool:
    return value.dtype.startswith(("INT", "UINT"))


def _list_layouts(values: Iterable[Value]) -> Iterator[tuple[Dim, ...]]:
    """Yield the batch and the positions of inputs that are not states, which embeddings share.

    The axes of a state after the batch are heads or channels. Of an input of integers the last
    two axes count, since position ids may have one in front.
    """
    for value in values:
        shape = value.shape or ()
        if len(shape) >= 2:
            yield shape[-2:] if _is_integer(value) else shape[:2]


def _find_hubs(pairs: Sequence[StatePair], graph: ModelGraph) -> frozenset[str]:
    """Return the inputs that all states are computed from, with outputs made of all of them."""
    if len(pairs) < 2:
        return frozenset()
    names = [pair.input.name for pair in pairs]
    dependencies = trace_dependencies(graph, names, [pair.output.name for pair in pairs])
    all_bits = (1 << len(names)) - 1
    read_by_all = all_bits
    for bits in dependencies:
        read_by_all &= bits
    return frozenset(
        name
        for position, name in enumerate(names)
        if read_by_all >> position & 1 and dependencies[position] == all_bits
    )


# What a state is combined with


class _Chain(NamedTuple):
    """What a value depends on, and how; each a set of sources, as bits.

    Attributes:
        sources: All that it depends on.
        alone: Those that came here through one operand of each operator: what they were combined
            with does not depend on them.
        renewed: Those with which something was combined that is new in each step.
        gated: Those that something scaled or chose from.
    """

    sources: int = 0
    alone: int = 0
    renewed: int = 0
    gated: int = 0


class _ChainTransfer(Transfer[_Chain]):
    """The chain of a value; what a function or a subgraph does inside is not looked into.

    The `new_sources` are those that no later step gets again, as bits.
    """

    nothing = _Chain()

    def __init__(self, new_sources: int) -> None:
        self._new_sources = new_sources
        self._dependencies = DependencyTransfer()

    def build_source(self, number: int) -> _Chain:
        return _Chain(1 << number, 1 << number)

    def apply_operator(
        self, operation: Operation, operands: Sequence[_Chain], constants: SmallConstants
    ) -> Sequence[_Chain]:
        """Return the chains of a node's outputs, by which of its operands depend on a source."""
        sources = [each.sources for each in operands]
        made = self._dependencies.apply_operator(operation, sources, constants)
        once = several = 0
        for bits in sources:
            several |= once & bits
            once |= bits
        combines, gates = operation.op_type in _COMBINING_OPS, operation.op_type in _GATING_OPS
        new_count = sum(bool(bits & self._new_sources) for bits in sources)
        varying_count = sum(map(bool, sources))
        alone = renewed = gated = 0
        for operand in operands:
            is_new = bool(operand.sources & self._new_sources)
            kept = operand.alone & ~several
            alone |= kept
            renewed |= kept if combines and new_count > is_new else kept & operand.renewed
            gated |= kept if gates and varying_count > 1 else kept & operand.gated
        return [_Chain(bits, alone & bits, renewed & bits, gated & bits) for bits in made]

    def apply_summary(
        self, summary: _Chain, arguments: Sequence[_Chain], call: NodeLocation
    ) -> _Chain:
        sources = [each.sources for each in arguments]
        return _Chain(self._dependencies.apply_summary(summary.sources, sources, call))

    def merge(self, values: Sequence[_Chain]) -> _Chain:
        return _Chain(self._dependencies.merge([each.sources for each in values]))


def _find_affine_states(
    pairs: Sequence[StatePair], others: Iterable[Value], graph: ModelGraph
) -> frozenset[str]:
    """Return the inputs with which nothing is combined that is computed from them.

    Something new has to be among it, that a later step gets again. And what was there has to
    make room, scaled or chosen from by a value that is not a constant.
    """
    sources = [*(pair.input.name for pair in pairs), *(value.name for value in others)]
    new_sources = (1 << len(sources)) - (1 << len(pairs))
    outputs = [pair.output.name for pair in pairs]
    chains = trace(graph, _ChainTransfer(new_sources), sources, outputs)
    return frozenset(
        pair.input.name
        for number, (pair, chain) in enumerate(zip(pairs, chains, strict=True))
        if chain.alone & chain.renewed & chain.gated & 1 << number
    )
