"""Describe vllm-qaic, which moves buffers through shared memory, by position.

Source: qualcomm/vllm-qaic at dc7351f, files ``model_loader/qaic_session_np.py`` (selection,
order, and the slices on the device), ``model_loader/qaic.py`` (the trial at start-up),
``worker/model_runner.py`` (the declared cache, and the one that LMCache refuses) and
``distributed/kv_transfer/kv_connector/v1/qaic_connector.py`` (the transfer). This was not tested on
a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from onnxkvrename.findings import Finding, build_finding, report_names
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import (
    describe_content,
    find_count_failure,
    has_wrong_output_count,
)
from onnxkvrename.handoff.name_checks import (
    describe_non_kv,
    format_renaming_hint,
    report_suffixes,
)
from onnxkvrename.handoff.selection import (
    ConsumerView,
    find_distinct_types,
    find_misnamed_logits,
)
from onnxkvrename.layout.layout import KvBuffer, Shape
from onnxkvrename.model.signature import format_shape
from onnxkvrename.text import format_count, format_list

TOKEN = "vllmKvCache"
SUFFIX = "_RetainedState"
_CONNECTOR = "QaicConnector"
_LMCACHE_CONNECTOR = "QaicLMCacheConnectorV1"
_CONTEXT_AXIS = 2
_MEMORY_HINT = "do not size memory for this model by vLLM's numbers"
_ITEMSIZES = {
    **dict.fromkeys(("INT8", "UINT8", "MXINT8"), 1),
    "FLOAT16": 2,
    **dict.fromkeys(("FLOAT", "INT32"), 4),
    "INT64": 8,
}


def selects_input(name: str) -> bool:
    """Return whether an input has the token, at any place in its name."""
    return TOKEN in name


def selects_output(name: str) -> bool:
    """Return whether an output has the token and a retained suffix, an internal one included."""
    return TOKEN in name and name.endswith("RetainedState")


def derive_input_name(name: str) -> str:
    """Return an output's name without ``_RetainedState``; an internal one stays as it is."""
    return name.replace(SUFFIX, "")


def parse_sort_key(name: str) -> tuple[int, str]:
    """Return the layer and the name: the layer is between the first dot and the next underscore.

    For a name without a dot, the layer is 0.

    Raises:
        ValueError: The text at this place is not a number.
    """
    parts = name.split(".")
    return int(parts[1].split("_")[0]) if len(parts) > 1 else 0, name


def compute_transferred_shape(shape: Shape, tokens: int | None) -> Shape:
    """Return one sequence of a shape; with four axes or more, the third only up to the prompt.

    The connector treats the third axis as the context, whatever it is.

    The shape has numbers only, the batch first. Without `tokens`, the prompt's length, it is full.
    """
    if tokens is None or len(shape) <= _CONTEXT_AXIS + 1:
        return (1, *shape[1:])
    length = shape[_CONTEXT_AXIS]
    assert isinstance(length, int)
    return (1, shape[1], min(tokens, length), *shape[_CONTEXT_AXIS + 1 :])


def is_logits_output(name: str) -> bool:
    """Return whether the consumer treats an output as logits."""
    return name.startswith("log")


def check_logits(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV604 for too few or too many outputs that start with ``log``.

    Prefill appends these outputs to the KV buffers and drops the last entry. The remaining list
    may be one longer than the buffers, but not shorter: so there may be one or two.
    """
    consumer, selection = view.consumer, view.selection
    names = [value.name for value in view.layout.outputs if is_logits_output(value.name)]
    effect = f"prefill fails {find_count_failure(view.layout, consumer)}"
    if len(selection.outputs) - len(selection.inputs) + len(names) - 1 in (0, 1):
        return
    if not names:
        name = find_misnamed_logits(view.layout)
        cause = (
            f"does not start with log, so {consumer.name} does not find the logits; it"
            if name
            else f"the model has no logits output; {consumer.name}"
        )
        yield build_finding(
            "KV604",
            name,
            f"{cause} then drops the last KV buffer instead, and {effect}",
            "export with logits, an output whose name starts with log, and without sampling on the "
            "device; a model for decode alone needs none: rename it with "
            f"`--prefix {consumer.token or 'TOKEN'}`, without --target",
        )
    elif len(names) > 1:
        yield build_finding(
            "KV604",
            names[1],
            f"starts with log, as {names[0]} does; {consumer.name} drops only 1 of the "
            f"{len(names)} outputs after the KV buffers, and {effect}",
            "rename or remove every such output except the logits",
        )


def check_truncated_buffers(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV605 for buffers whose third axis is not the context, but is cut to the prompt.

    The connector cuts all buffers of four axes or more, unless it moves all of each.
    """
    if view.full_transfer:
        return
    groups: dict[tuple[str, Shape], list[str]] = {}
    for buffer in view.buffers:
        if buffer.shape is not None and _is_truncated(buffer):
            shape = view.layout.resolve_shape(buffer.shape)
            if shape[_CONTEXT_AXIS] != 1:  # every prompt has a first token, so nothing is lost
                groups.setdefault((describe_content(buffer), shape), []).append(buffer.names[0])
    for (content, shape), names in groups.items():
        yield from report_names(
            "KV605",
            names,
            ("has", "have"),
            f"the shape {format_shape(shape)}; of axis {_CONTEXT_AXIS}, {view.consumer.name} moves "
            "only as many positions as the prompt has tokens, but this axis is not the context "
            f"({content}): a prompt shorter than {shape[_CONTEXT_AXIS]} tokens loses data",
            "set VLLM_QAIC_USE_FULL_KV_TRANSFER=1 on both sides, and pass `--full-transfer`",
            "buffers",
        )


def check_sliced_suffixes(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV602 for outputs of a hybrid model that get no slices because of their suffix.

    Where all buffers have one shape, one expression slices them all, and outputs pair by position.
    """
    if view.is_hybrid:
        effect = f"in a hybrid model, {view.consumer.name} slices only outputs with this suffix"
        yield from report_suffixes(view, SUFFIX, effect)


def _is_truncated(buffer: KvBuffer) -> bool:
    if buffer.shape is None or len(buffer.shape) <= _CONTEXT_AXIS + 1:
        return False
    return buffer.has_no_prompt_axis or buffer.prompt_axis not in (None, _CONTEXT_AXIS)


def check_uniform_types(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV606 for different shapes or dtypes: the LMCache connector refuses them at start."""
    types = find_distinct_types(view.layout, view.selection.inputs)
    if len(types) > 1:
        shapes, dtypes = (len(set(values)) > 1 for values in zip(*types, strict=True))
        different = "shapes and dtypes" if shapes and dtypes else "shapes" if shapes else "dtypes"
        yield build_finding(
            "KV606",
            "",
            f"layers have different cache {different}; {_LMCACHE_CONNECTOR} will not start",
            f"use {_CONNECTOR}",
        )


def check_declared_attention(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV607 for layers that are not full attention, and for different numbers of heads.

    The model runner declares every layer as full attention with the same heads. The open pull
    request qualcomm/vllm-qaic#88 declares sliding windows as well.
    """
    consumer = view.consumer
    buffers = [buffer for buffer in view.buffers if buffer.kind != "unknown"]
    non_full = [buffer for buffer in buffers if buffer.kind != "full_attention"]
    kinds = format_list(sorted({buffer.kind for buffer in non_full}))
    yield from report_names(
        "KV607",
        [buffer.names[0] for buffer in non_full],
        ("is", "are"),
        f"{kinds}, but {consumer.name} declares them full_attention",
        f"{_MEMORY_HINT} before qualcomm/vllm-qaic#88"
        if kinds == "sliding_window"
        else _MEMORY_HINT,
        "buffers",
    )
    heads = {
        buffer.shape[1]: buffer
        for buffer in buffers
        if not buffer.is_state and buffer.shape is not None and len(buffer.shape) == 4
    }
    if len(heads) > 1:
        *others, last = heads
        yield build_finding(
            "KV607",
            heads[last].names[0],
            f"has {last} KV heads, and other buffers have {format_list(list(map(str, others)))}; "
            f"{consumer.name} declares the same number for every layer",
            _MEMORY_HINT,
        )


def check_non_kv_selected(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV608 for selected values that are not KV buffers, with the effect on the buffers.

    Where all buffers still pair and are handed over, it is a warning.
    """
    names = [each.value.name for each in view.non_kv_values]
    if not names:
        return
    harm = _explain_non_kv_harm(view)
    finding = build_finding(
        "KV608",
        names[0],
        f"{describe_non_kv(names, view.consumer)}; {harm or _explain_non_kv_effect(view)}",
        format_renaming_hint(view.consumer),
    )
    yield finding if harm else finding._replace(severity="warning")


def _explain_non_kv_harm(view: ConsumerView) -> str:
    """Return how the values harm the buffers, empty if they do not."""
    inputs, outputs = view.selection.inputs, view.selection.outputs
    if not view.selection.is_ordered:
        name = view.consumer.name
        return f"a name has no number where it reads the layer, and {name} cannot start"
    if len(outputs) < len(inputs) or has_wrong_output_count(view):
        counts = f"{format_count(len(inputs), 'input')} and {format_count(len(outputs), 'output')}"
        when = find_count_failure(view.layout, view.consumer)
        return f"it then selects {counts}, and prefill fails {when}"
    for selected_input, output in zip(inputs, outputs, strict=False):
        input_name = selected_input.value.name
        if input_name != output.graph_input_name:
            return f"the pairing by position shifts: it writes {output.value.name} to {input_name}"
    return ""


def _explain_non_kv_effect(view: ConsumerView) -> str:
    """Return the effect of values that do not harm the buffers."""
    inputs, outputs = view.selection.inputs, view.selection.outputs
    if len(outputs) > len(inputs):
        return "the last output in this order is left out, and only its name puts it last"
    kv_inputs = [each for each in inputs if each.buffer is not None]
    if view.is_hybrid and len(find_distinct_types(view.layout, kv_inputs)) <= 1:
        return "the different shape or dtype makes the model count as hybrid, which it is not"
    return "every prompt then hands over more than the KV buffers"


def check_slice_ranks(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV610 for a rank that slices on the device cannot have.

    Slices have four axes; with hybrid buffers, also three. It is not documented how the device's
    runtime treats a different rank.
    """
    ranks = (3, 4) if view.is_hybrid else (4,)
    buffers = view.buffers
    if not buffers:  # no name has the token yet: check all of them
        buffers = view.layout.buffers
        ranks = (4,) if len({(b.dtype, b.shape) for b in buffers}) == 1 else (3, 4)
    for buffer in buffers:
        if buffer.shape and len(buffer.shape) not in ranks:
            yield build_finding(
                "KV610",
                buffer.names[0],
                f"has {format_count(len(buffer.shape), 'axis', 'axes')}, but {view.consumer.name} "
                f"slices for {ranks[0]}",
                "no option of vllm-qaic changes this",
            )
            return
    if view.is_hybrid:
        yield from _check_overlapping_slices(view)


def _check_overlapping_slices(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV610 for outputs that match the slice expression of another one, ``NAME.*``."""
    consumer = view.consumer
    outputs = (value for value in view.layout.outputs if consumer.selects_output(value.name))
    bases = sorted(
        ((derive_input_name(value.name), value) for value in outputs), key=lambda pair: pair[0]
    )
    for (base, value), (longer_base, longer) in pairwise(bases):
        types = {(len(v.shape or ()), consumer.itemsize_of(v.dtype)) for v in (value, longer)}
        if longer_base.startswith(base) and len(types) > 1:
            yield build_finding(
                "KV610",
                longer.name,
                f"also matches {base}.*, the expression for the slices of {base}, which have "
                "another rank or element size",
                "export the model again, with names of which none begins with another one",
            )


CONSUMER = Consumer(
    name="vllm-qaic",
    token=TOKEN,
    selects_input=selects_input,
    selects_output=selects_output,
    input_name_of=derive_input_name,
    sort_key=parse_sort_key,
    transferred_shape=compute_transferred_shape,
    is_appended_output=is_logits_output,
    trial_output="logits",
    itemsize_of=_ITEMSIZES.get,
    selected_outputs=f"*{TOKEN}*RetainedState",
    output_suffix=SUFFIX,
    alternative="vllm-qaic-legacy",
    checks=(
        check_logits,
        check_truncated_buffers,
        check_uniform_types,
        check_declared_attention,
        check_non_kv_selected,
        check_slice_ranks,
        check_sliced_suffixes,
    ),
)
