"""Compare what shows whether both sides of a hand-off are one model: weights, logits, scales.

Exports of one model may differ in their graphs, lengths and generated names. A parameter name of
the framework that both sides have is the same parameter; a name that only one side has is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.findings import Finding, begin_message, build_finding, format_count, report_names
from onnxkvrename.handoff.comparison import BufferPair
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import LoadedLayout
from onnxkvrename.model.signature import format_shape
from onnxkvrename.model.weights import WEIGHT_SUFFIXES, Weight
from onnxkvrename.storage.read import (
    has_content,
    open_file,
    read_chunks,
    resolve_path,
)


class SharedFiles(NamedTuple):
    """Which files both sides are known to have alike.

    Attributes:
        is_same_graph: Whether their ONNX files are equal, byte for byte.
        is_same_data: Whether all weights are in these, or in the same other files.
    """

    is_same_graph: bool = False
    is_same_data: bool = False


NO_SHARED_FILES = SharedFiles()


class ModelIdentity(NamedTuple):
    """What is known of whether both sides are one model.

    Attributes:
        is_same_graph: Whether both are known to be the same graph: their ONNX files are equal.
        is_same_model: Whether all of their weights are known to be the same files, too; those
            that are inputs, as in a weight-free export or for LoRA, are not.
        weights: The weights with the same name on both sides.
        unknown_sides: The sides whose weights are not known.
        logits: How the logits differ; empty if they do not, or if that is not known.
    """

    is_same_graph: bool
    is_same_model: bool
    weights: tuple[tuple[Weight, Weight], ...]
    unknown_sides: tuple[str, ...]
    logits: str

    @property
    def compared_count(self) -> int:
        """The number of weights whose values are compared."""
        return sum(_have_comparable_values(*pair) for pair in self.weights)


def find_shared_files(
    paths: tuple[Path | None, Path | None], sides: tuple[LoadedLayout, LoadedLayout]
) -> SharedFiles:
    """Return which files both sides have alike; of manifests and models in memory unknown.

    Args:
        paths: The model, directory or manifest that was read for prefill, and for decode;
            ``None`` for what was read at another time, or from no file.
        sides: What was read there.

    Raises:
        ModelError: A model cannot be read any more.
    """
    prefill, decode = paths
    if prefill is not None and decode is not None and resolve_path(prefill) == resolve_path(decode):
        return SharedFiles(is_same_graph=True, is_same_data=True)
    models = [list(side.identities.items()) for side in sides]
    if not all(models) or len(models[0]) != len(models[1]):
        return NO_SHARED_FILES
    for (path, identity), (other_path, other_identity) in zip(*models, strict=True):
        if identity != other_identity:
            with open_file(Path(path)) as file, open_file(Path(other_path)) as other:
                known = (identity.matches(file.identity), other_identity.matches(other.identity))
                chunks = read_chunks(file, 0, file.size)
                if not all(known) or not has_content(Path(other_path), file.size, chunks):
                    return NO_SHARED_FILES
    data = [list(map(resolve_path, side.data_paths)) for side in sides]
    return SharedFiles(is_same_graph=True, is_same_data=data[0] == data[1])


def compare_models(prefill: Layout, decode: Layout, shared: SharedFiles) -> ModelIdentity:
    """Return what is known of whether both sides are one model."""
    others = {weight.name: weight for weight in decode.weights or ()}
    sides = {"prefill": prefill, "decode": decode}
    has_given_weights = any(value.name.endswith(WEIGHT_SUFFIXES) for value in prefill.inputs)
    return ModelIdentity(
        shared.is_same_graph,
        shared.is_same_graph and shared.is_same_data and not has_given_weights,
        tuple((w, others[w.name]) for w in prefill.weights or () if w.name in others),
        tuple(label for label, layout in sides.items() if layout.weights is None),
        _compare_logits(prefill, decode),
    )


def check_same_model(identity: ModelIdentity) -> Iterator[Finding]:
    """Yield KV623 if weights or logits show that the two sides are different models."""
    texts = [(first.name, _describe_weights(first, second)) for first, second in identity.weights]
    weights = [(name, text) for name, text in texts if text]
    reasons = [_format_different_weights(weights, len(texts))] if weights else []
    if identity.logits:
        reasons.append(f"logits {identity.logits}" if weights else identity.logits)
    if reasons:
        yield build_finding(
            "KV623",
            weights[0][0] if weights else "logits",
            f"{'; '.join(reasons)}; prefill and decode are different models, and decode reads what "
            "the other model wrote",
            "export both from the same model, with the same weights",
        )


def list_model_notes(identity: ModelIdentity) -> list[str]:
    """Return a note if it is not known whether both sides are the same model.

    Equal sizes are not enough: two trainings of one architecture have the same sizes.
    """
    if identity.is_same_model or identity.compared_count:
        return []
    reason = "no weight has the same name on both sides"
    if identity.unknown_sides:
        reason = f"the weights of {' and '.join(identity.unknown_sides)} are not known"
    elif identity.weights:
        reason = "only the sizes of weights could be compared, not their values"
    return [f"cannot tell whether both sides are the same model: {reason}"]


class Basis(NamedTuple):
    """What a success rests on.

    Attributes:
        facts: What was compared, and is equal.
        conditions: What is not known, each to be continued after ``both sides``.
    """

    facts: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


NO_BASIS = Basis()


def find_basis(
    identity: ModelIdentity,
    layouts: tuple[Layout, Layout],
    consumer: Consumer,
    pairs: Sequence[BufferPair],
) -> Basis:
    """Return what the success of a hand-off from prefill to decode rests on."""
    facts, conditions = list[str](), list[str]()
    if consumer.is_paged:  # nothing is compiled, and no rule is about a graph
        facts.append("equal layers, dtypes and sizes")
    else:
        facts.append(f"{consumer.name}'s rules")
        if all(layout.has_compiled_dtypes for layout in layouts):
            facts.append("the precision of both compiles")
        else:
            conditions.append("are compiled with the same precision")
    scales = [pair.has_known_scales for pair in pairs]
    if False in scales:
        conditions.append("use the same scales (KV627)")
    elif True in scales:
        facts.append(f"equal scales of {format_count(scales.count(True), 'buffer')}")
    if identity.is_same_graph:
        weights = " and weights" if identity.is_same_model else ""
        facts.append(f"the same graph{weights} on both sides")
    if identity.compared_count and not identity.is_same_model:
        facts.append(_describe_equal_weights(identity))
    elif not identity.is_same_model:
        conditions.append("are the same model")
    return Basis(tuple(facts), tuple(conditions))


def _describe_equal_weights(identity: ModelIdentity) -> str:
    """Return how many weights are equal, as far as they were read."""
    pairs = [pair for pair in identity.weights if _have_comparable_values(*pair)]
    count = format_count(len(pairs), "weight")
    if len(pairs) < len(identity.weights):
        count += f" of {len(identity.weights):,} with the same name"
    is_whole = all(weight.is_read_whole for weight, _ in pairs)
    return f"equal values of {count}" if is_whole else f"equal first values of {count}"


def check_scales_known(pairs: Sequence[BufferPair]) -> Iterator[Finding]:
    """Yield KV627, once, for quantized buffers whose scales could not be compared."""
    return report_names(
        "KV627",
        [pair.name for pair in pairs if pair.has_known_scales is False],
        ("is", "are"),
        "quantized, and the scales are not constants of both graphs: whether decode reads the "
        "values that prefill stored is not known",
        "compare the results of both sides for one prompt",
        "buffers",
    )


def _format_different_weights(differences: Sequence[tuple[str, str]], compared: int) -> str:
    names, texts = zip(*differences, strict=True)
    noun = f"of {compared} compared weights"
    beginning = begin_message(names, f"{texts[0]} (1 {noun})", "differ", noun)
    return beginning if len(names) == 1 else f"{beginning}: the first {texts[0]}"


def _compare_logits(prefill: Layout, decode: Layout) -> str:
    """Return how the logits differ; empty if they do not, or if the last layers are different.

    A model without its last layers has hidden states instead of logits, possibly with that name.
    """
    if _find_last_layer(prefill) != _find_last_layer(decode):
        return ""
    first, second = (_find_vocabulary(layout) for layout in (prefill, decode))
    if None in (first, second) or first == second:
        return ""
    return f"has {first} entries on prefill and {second} on decode"


def _find_last_layer(layout: Layout) -> int:
    return max((buffer.layer for buffer in layout.buffers), default=-1)


def _have_comparable_values(first: Weight, second: Weight) -> bool:
    """Return whether both have a digest, and the same dtype and shape."""
    is_same_type = (first.dtype, first.shape) == (second.dtype, second.shape)
    return is_same_type and None not in (first.sha256, second.sha256)


def _describe_weights(first: Weight, second: Weight) -> str:
    """Return how two weights with the same name differ, empty if they do not."""
    if sorted(first.shape) != sorted(second.shape):  # one of them may be transposed
        shapes = (format_shape(each.shape) for each in (first, second))
        return "is {} on prefill and {} on decode".format(*shapes)
    if _have_comparable_values(first, second) and first.sha256 != second.sha256:
        return "has different values on decode"
    return ""


def _find_vocabulary(layout: Layout) -> int | None:
    """Return the number of logits for a token, ``None`` if the graph does not show it.

    In a set of windows, other values may be named ``logits``, so there it is ``None``.
    """
    if len(layout.models) > 1:
        return None
    shapes = (value.shape for value in layout.outputs if value.name == "logits")
    last = next((shape[-1] for shape in shapes if shape), None)
    return last if isinstance(last, int) else None
