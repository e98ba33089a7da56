"""The JSON document of ``onnxkvrename pairs``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.layout.updates import ShownUpdate
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
