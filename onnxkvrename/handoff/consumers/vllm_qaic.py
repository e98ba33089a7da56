"""Describe vllm-qaic, which moves buffers through shared memory, by position.

Source: qualcomm/vllm-qaic at dc7351f, files ``model_loader/qaic_session_np.py`` (selection,
order, and the slices on the device), ``worker/model_runner.py`` (the declared cache, and
the one that LMCache refuses) and
``distributed/kv_transfer/kv_connector/v1/qaic_connector.py`` (the transfer). This was not tested on
a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from onnxkvrename.findings import (
    Finding,
    begin_message,
    build_finding,
    format_count,
    format_list,
)
from onnxkvrename.handoff.consumer import Consumer, add_checks
from onnxkvrename.handoff.consumer_checks import (
    describe_content,
    has_wrong_output_count,
)
from onnxkvrename.handoff.name_checks import (
    build_suffix_finding,
    describe_non_kv,
    format_renaming_hint,
    list_underived_outputs,
)
from onnxkvrename.handoff.selection import (
    Selection,
    find_distinct_types,
    find_misnamed_logits,
    find_non_kv_selected,
    find_selected_buffers,
    is_hybrid,
    select_values,
)
from onnxkvrename.layout.layout import KvBuffer, Layout, Shape
from onnxkvrename.model.signature import format_shape

TOKEN = "vllmKvCache"
SUFFIX = "_RetainedState"
_CONTEXT_AXIS = 2
_MEMORY_HINT = "do not use vLLM's numbers to size memory for this model"
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


def check_logits(consumer: Consumer, layout: Layout, full_transfer: bool) -> Iterator[Finding]:
    """Yield KV604 for too few or too many outputs that start with ``log``.

    Prefill appends these outputs to the KV buffers and drops the last entry. The remaining list
    may be one longer than the buffers, but not shorter: so there may be one or two.
    """
    names = [value.name for value in layout.outputs if is_logits_output(value.name)]
    selection = select_values(layout, consumer)
    if len(selection.outputs) - len(selection.inputs) + len(names) - 1 in (0, 1):
        return
    if not names:
        name = find_misnamed_logits(layout)
        cause = (
            f"does not start with log, so {consumer.name} does not find the logits; it"
            if name
            else f"the model has no logits output; {consumer.name}"
        )
        yield build_finding(
            "KV604",
            name,
            f"{cause} then drops the last KV buffer instead, and prefill fails with "
            '"buffer count mismatch"',
            "export with logits, an output whose name starts with log, and without sampling on the "
            "device; a model for decode alone needs none: rename it with "
            f"`--prefix {consumer.token or 'TOKEN'}`, without --target",
        )
    elif len(names) > 1:
        yield build_finding(
            "KV604",
            names[1],
            f"starts with log, as {names[0]} does; {consumer.name} drops only 1 of the "
            f'{len(names)} outputs after the KV buffers, and prefill fails with "buffer count '
            'mismatch"',
            "rename or remove every such output except the logits",
        )


def check_truncated_buffers(
    consumer: Consumer, layout: Layout, full_transfer: bool
) -> Iterator[Finding]:
    """Yield KV605 for buffers whose third axis is not the context, but is cut to the prompt.

    The connector cuts all buffers of four axes or more, unless it moves all of each.
    """
    if full_transfer:
        return
    groups: dict[tuple[str, Shape], list[str]] = {}
    for buffer in find_selected_buffers(layout, consumer):
        if buffer.shape is not None and _is_truncated(buffer):
            shape = layout.resolve_shape(buffer.shape)
            if shape[_CONTEXT_AXIS] != 1:  # every prompt has a first token, so nothing is lost
                groups.setdefault((describe_content(buffer), shape), []).append(buffer.names[0])
    for (content, shape), names in groups.items():
        yield build_finding(
            "KV605",
            names[0],
            f"{begin_message(names, 'has', 'have', 'buffers')} the shape {format_shape(shape)}; "
            f"of axis {_CONTEXT_AXIS}, {consumer.name} moves only as many positions as the prompt "
            f"has tokens, but this axis is not the context ({content}): a prompt shorter than "
            f"{shape[_CONTEXT_AXIS]} tokens loses data",
            "set VLLM_QAIC_USE_FULL_KV_TRANSFER=1 on both sides, and pass `--full-transfer`",
        )


def check_sliced_suffixes(
    consumer: Consumer, layout: Layout, full_transfer: bool
) -> Iterator[Finding]:
    """Yield KV602 for outputs of a hybrid model that get no slices because of their suffix.

    Where all buffers have one shape, one expression slices them all, and outputs pair by position.
    """
    names = list_underived_outputs(layout, consumer) if is_hybrid(layout, consumer) else []
    if names:
        yield build_suffix_finding(
            layout,
            consumer,
            names,
            f"{begin_message(names, 'does', 'do', 'outputs')} not end in {SUFFIX}; "
            f"in a hybrid model, {consumer.name} slices only outputs with this suffix",
        )


def _is_truncated(buffer: KvBuffer) -> bool:
    if buffer.shape is None or len(buffer.shape) <= _CONTEXT_AXIS + 1:
        return False
    return buffer.has_no_prompt_axis or buffer.prompt_axis not in (None, _CONTEXT_AXIS)


def check_uniform_types(
    consumer: Consumer, layout: Layout, full_transfer: bool
) -> Iterator[Finding]:
    """Yield KV606 for different shapes or dtypes: the LMCache connector refuses them at start."""
    types = find_distinct_types(layout, select_values(layout, consumer).inputs)
    if len(types) > 1:
        shapes, dtypes = (len(set(values)) > 1 for values in zip(*types, strict=True))
        different = "shapes and dtypes" if shapes and dtypes else "shapes" if shapes else "dtypes"
        yield build_finding(
            "KV606",
            "",
            f"layers have different cache {different}; QaicLMCacheConnectorV1 will not start",
            "use QaicConnector",
        )


def check_declared_attention(
    consumer: Consumer, layout: Layout, full_transfer: bool
) -> Iterator[Finding]:
    """Yield KV607 for layers that are not full attention, and for different numbers of heads.

    The model runner declares every layer as full attention with the same heads. The open pull
    request qualcomm/vllm-qaic#88 declares sliding windows as well.
    """
    buffers = [
        buffer for buffer in find_selected_buffers(layout, consumer) if buffer.kind != "unknown"
    ]
    non_full = [buffer for buffer in buffers if buffer.kind != "full_attention"]
    if non_full:
        kinds = format_list(sorted({buffer.kind for buffer in non_full}))
        names = [buffer.names[0] for buffer in non_full]
        yield build_finding(
            "KV607",
            names[0],
            f"{begin_message(names, 'is', 'are', 'buffers')} {kinds}, but {consumer.name} declares "
            "every layer as full_attention, and vLLM counts blocks and bytes by that",
            f"{_MEMORY_HINT}, unless qualcomm/vllm-qaic#88 is in it"
            if kinds == "sliding_window"
            else _MEMORY_HINT,
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


def check_non_kv_selected(
    consumer: Consumer, layout: Layout, full_transfer: bool
) -> Iterator[Finding]:
    """Yield KV608 for selected values that are not KV buffers, with the effect on the buffers.

    Where all buffers still pair and are handed over, it is a warning.
    """
    selection = select_values(layout, consumer)
    names = [each.value.name for each in find_non_kv_selected(layout, selection)]
    if not names:
        return
    harm = _explain_non_kv_harm(layout, selection, consumer)
    finding = build_finding(
        "KV608",
        names[0],
        f"{describe_non_kv(names, consumer)}; {harm or _explain_non_kv_effect(layout, selection)}",
        format_renaming_hint(consumer),
    )
    yield finding if harm else finding._replace(severity="warning")


def _explain_non_kv_harm(layout: Layout, selection: Selection, consumer: Consumer) -> str:
    """Return how the values harm the buffers, empty if they do not."""
    inputs, outputs = selection.inputs, selection.outputs
    if not selection.is_ordered:
        return f"a name has no number where it reads the layer, and {consumer.name} cannot start"
    if len(outputs) < len(inputs) or has_wrong_output_count(layout, selection, consumer):
        counts = f"{format_count(len(inputs), 'input')} and {format_count(len(outputs), 'output')}"
        return f'it then selects {counts}, and prefill fails with "buffer count mismatch"'
    for selected_input, output in zip(inputs, outputs, strict=False):
        input_name = selected_input.value.name
        if input_name != output.graph_input_name:
            return f"the pairing by position shifts: it writes {output.value.name} to {input_name}"
    return ""


def _explain_non_kv_effect(layout: Layout, selection: Selection) -> str:
    """Return the effect of values that do not harm the buffers."""
    inputs, outputs = selection.inputs, selection.outputs
    if len(outputs) > len(inputs):
        return "the last output in this order is left out, and only its name puts it last"
    kv_inputs = [each for each in inputs if each.buffer is not None]
    if len(find_distinct_types(layout, kv_inputs)) <= 1 < len(find_distinct_types(layout, inputs)):
        return "the different shape or dtype makes the model count as hybrid, which it is not"
    return "every prompt then hands over more than the KV buffers"


def check_slice_ranks(consumer: Consumer, layout: Layout, full_transfer: bool) -> Iterator[Finding]:
    """Yield KV610 for a rank that slices on the device cannot have.

    Slices have four axes; with hybrid buffers, also three. It is not documented how the device's
    runtime treats a different rank.
    """
    hybrid = is_hybrid(layout, consumer)
    ranks = (3, 4) if hybrid else (4,)
    buffers = find_selected_buffers(layout, consumer)
    if not buffers:  # no name has the token yet: check all of them
        buffers = layout.buffers
        ranks = (4,) if len({(b.dtype, b.shape) for b in buffers}) == 1 else (3, 4)
    for buffer in buffers:
        if buffer.shape and len(buffer.shape) not in ranks:
            yield build_finding(
                "KV610",
                buffer.names[0],
                f"has {format_count(len(buffer.shape), 'axis', 'axes')}, but {consumer.name} "
                f"slices for {ranks[0]}",
                "no option of vllm-qaic changes this",
            )
            return
    if hybrid:
        yield from _check_overlapping_slices(layout, consumer)


def _check_overlapping_slices(layout: Layout, consumer: Consumer) -> Iterator[Finding]:
    """Yield KV610 for outputs that match the slice expression of another one, ``NAME.*``."""
    outputs = (value for value in layout.outputs if consumer.selects_output(value.name))
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
                "fix the templates in your --rules FILE so that no name begins with another one",
            )


CHECKS = (
    check_logits,
    check_truncated_buffers,
    check_uniform_types,
    check_declared_attention,
    check_non_kv_selected,
    check_slice_ranks,
    check_sliced_suffixes,
)
CONSUMER = add_checks(
    Consumer(
        name="vllm-qaic",
        token=TOKEN,
        source="qualcomm/vllm-qaic at dc7351f",
        selects_input=selects_input,
        selects_output=selects_output,
        input_name_of=derive_input_name,
        sort_key=parse_sort_key,
        transferred_shape=compute_transferred_shape,
        is_appended_output=is_logits_output,
        itemsize_of=_ITEMSIZES.get,
        needs_in_place=True,
        selected_outputs=f"*{TOKEN}*RetainedState",
        output_suffix=SUFFIX,
        alternative="vllm-qaic-legacy",
    ),
    *CHECKS,
)
