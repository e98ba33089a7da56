"""The JSON documents of ``onnxkvrename pairs``: its own, and those that other programs read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.layout.updates import ShownUpdate, are_same_sizes, compare_dims
from onnxkvrename.model.signature import Dim
from onnxkvrename.records import Document
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.pairs.infer_rules import TracedModel


class Pair(NamedTuple):
    """An input, and the output that is a later state of it.

    Attributes:
        input: The input.
        output: The output.
        dtype: The element type of both sides, in ONNX's words.
        input_shape: Sizes, symbols, and `None` for what is not known; `None` without a rank.
        output_shape: The shape of the output, likewise.
        update: How the output is made from the input.
        feeds_back: Whether the output is all of the next state in every step.
    """

    input: str
    output: str
    dtype: str
    input_shape: tuple[Dim, ...] | None
    output_shape: tuple[Dim, ...] | None
    update: ShownUpdate
    feeds_back: bool


class Model(NamedTuple):
    """The caches of one model.

    Attributes:
        path: The path of the model; `None` if it has none.
        pairs: Each input with the output that is a later state of it.
        error: Why this model could not be read; `None` otherwise.
    """

    path: str | None
    pairs: tuple[Pair, ...] = ()
    error: KvRenameError | None = None


class PairsContent(NamedTuple):
    """The caches of models, found by dataflow alone.

    Attributes:
        models: One entry for each model.
    """

    models: tuple[Model, ...]


DOCUMENT = Document("onnxkvrename.pairs/1", "pairs", PairsContent(()))


def describe_pairs(models: Iterable[TracedModel | ModelError]) -> PairsContent:
    """Return the pairs of models, or why one cannot be read."""
    return PairsContent(tuple(map(_describe_model, models)))


def _describe_model(model: TracedModel | ModelError) -> Model:
    if isinstance(model, ModelError):
        return Model(model.path, error=model)
    return Model(str(model.path), tuple(map(_describe_pair, model.pairs)))


def _describe_pair(pair: StatePair) -> Pair:
    return Pair(
        pair.input.name,
        pair.output.name,
        pair.input.dtype,
        pair.input.shape,
        pair.output.shape,
        pair.update,
        pair.feeds_back,
    )


def build_stateful_map(pairs: Iterable[StatePair]) -> Mapping[str, str]:
    """Return the map for OpenVINO's MakeStateful: the outputs that go back as they are."""
    return {pair.input.name: pair.output.name for pair in pairs if pair.feeds_back}


def build_io_bindings(pairs: Iterable[StatePair]) -> list[dict[str, Any]]:
    """Return what an IO binding of onnxruntime needs to know of each pair.

    ``next_input`` says what the input is in the next step: the ``output``; the ``join`` of both
    along ``axis``; or what was the ``first_output``, in each later step.
    """
    return [
        {
            "input": pair.input.name,
            "output": pair.output.name,
            "dtype": pair.input.dtype,
            "input_shape": pair.input.shape,
            "output_shape": pair.output.shape,
            "next_input": _name_next_input(pair),
            "axis": pair.update.axis,
            "same_size": _has_same_size(pair),
        }
        for pair in pairs
    ]


def _name_next_input(pair: StatePair) -> str:
    if pair.feeds_back:
        return "output"
    return "join" if pair.update.kind == "delta" else "first_output"


def _has_same_size(pair: StatePair) -> bool:
    """Return whether input and output are shown to have one size, so that buffers can be reused."""
    has_one_size = pair.update.kind in ("inplace", "shift", "once")
    return has_one_size and are_same_sizes(compare_dims(pair.input.shape, pair.output.shape))


def render_value(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2)
