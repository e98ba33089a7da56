"""Describe vllm-qaic, which moves buffers through shared memory, by position.

Source: qualcomm/vllm-qaic at dc7351f, files ``model_loader/qaic_session_np.py`` (selection,
order, and the slices on the device), ``worker/model_runner.py`` (the declared cache, and
the one that LMCache refuses) and
``distributed/kv_transfer/kv_connector/v1/qaic_connector.py`` (the transfer). None of
this was tested on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.handoff.consumer import Consumer, add_checks
from onnxkvrename.handoff.consumer_checks import (
    describe_content,
    has_wrong_output_count,
)
from onnxkvrename.handoff.name_checks import (
    format_renaming_hint,
    format_similar_count,
)
from onnxkvrename.handoff.selection import (
    Selection,
    find_distinct_types,
    find_non_kv_selected,
    find_selected_buffers,
    is_hybrid,
    select_values,
)
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.model.signature import format_shape

TOKEN = "vllmKvCache"
SUFFIX = "_RetainedState"
_CONTEXT_AXIS = 2
_MEMORY_HINT = "do not size memory by vLLM's numbers for this model"
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
    """Return the number between the first dot and the next underscore, and the name.

    The number is 0 for a name without a dot.

    Raises:
        ValueError: There is no number at this place.
    """
    parts = name.split(".")
    return int(parts[1].split("_")[0]) if len(parts) > 1 else 0, name


def compute_transferred_shape(shape: Shape, tokens: int | None) -> Shape:
    """Return one sequence of a shape; with four axes or more, the third only up to the prompt.

    The connector takes the third axis for the context, whatever it is.

    Args:
        shape: The full shape, batch first, with numbers only.
        tokens: The length of the prompt; ``None`` to move each buffer in full.
    """
    if tokens is None or len(shape) <= _CONTEXT_AXIS + 1:
        return (1, *shape[1:])
    length = shape[_CONTEXT_AXIS]
    assert isinstance(length, int)
    return (1, shape[1], min(tokens, length), *shape[_CONTEXT_AXIS + 1 :])


def is_logits_output(name: str) -> bool:
    """Return whether the consumer takes an output for logits."""
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
        yield build_finding(
            "KV604",
            "",
            "no output starts with log: in its place the last KV buffer is taken off, and "
            'prefill stops with "buffer count mismatch"',
            "export with logits, without sampling on the device; a model for decode alone needs "
            f"none{f', and --prefix {consumer.token} renames it' if consumer.token else ''}",
        )
    elif len(names) > 1:
        yield build_finding(
            "KV604",
            names[1],
            f"starts with log, as {names[0]} does: {len(names)} outputs stand behind the KV "
            'buffers, one is taken off, and prefill stops with "buffer count mismatch"',
            "rename or drop every such output but the logits",
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
    for (reason, shape), names in groups.items():
        yield build_finding(
            "KV605",
            names[0],
            f"{reason}, {format_shape(shape)}{format_similar_count(names)}: of a prompt of n "
            f"tokens only the first n along axis {_CONTEXT_AXIS} are moved, and the rest is lost "
            f"where n is less than {shape[_CONTEXT_AXIS]}",
            "set VLLM_QAIC_USE_FULL_KV_TRANSFER=1 on both sides, and check with --full-transfer",
        )


def _is_truncated(buffer: KvBuffer) -> bool:
    if buffer.shape is None or len(buffer.shape) <= _CONTEXT_AXIS + 1:
        return False
    return buffer.has_no_prompt_axis or buffer.prompt_axis not in (None, _CONTEXT_AXIS)


def check_uniform_types(
    consumer: Consumer, layout: Layout, full_transfer: bool
) -> Iterator[Finding]:
    """Yield KV606 for different shapes or dtypes, which the LMCache connector refuses at start."""
    count = len(find_distinct_types(layout, select_values(layout, consumer).inputs))
    if count > 1:
        yield build_finding(
            "KV606",
            "",
            f"{count} different shapes or dtypes: hybrid, which QaicLMCacheConnectorV1 refuses "
            "at start",
            "hand over with QaicConnector",
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
        yield build_finding(
            "KV607",
            non_full[0].names[0],
            f"is {non_full[0].kind}, one of {len(non_full)} such buffers ({kinds}): every layer is "
            "declared as full_attention, and vLLM counts blocks and bytes accordingly",
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
        counts = format_list([str(count) for count in heads])
        yield build_finding(
            "KV607",
            [*heads.values()][-1].names[0],
            f"has other heads than most: there are {counts}, and every layer is declared alike",
            _MEMORY_HINT,
        )


def check_non_kv_selected(
    consumer: Consumer, layout: Layout, full_transfer: bool
) -> Iterator[Finding]:
    """Yield KV608 for selected values that are not KV buffers, with the effect on the buffers.

    Where all buffers pair and are handed over all the same, it is a warning.
    """
    selection = select_values(layout, consumer)
    names = [each.value.name for each in find_non_kv_selected(layout, selection)]
    if not names:
        return
    harm = _explain_non_kv_harm(layout, selection, consumer)
    finding = build_finding(
        "KV608",
        names[0],
        f"{consumer.selecting_trait}, and is no KV buffer{format_similar_count(names)}: "
        f"{harm or _explain_non_kv_effect(layout, selection)}",
        format_renaming_hint(consumer),
    )
    yield finding if harm else finding._replace(severity="warning")


def _explain_non_kv_harm(layout: Layout, selection: Selection, consumer: Consumer) -> str:
    """Return what goes wrong with the buffers, empty if nothing does."""
    inputs, outputs = selection.inputs, selection.outputs
    if not selection.is_ordered:
        return "no layer can be read in one of the names, and it cannot start"
    if len(outputs) < len(inputs) or has_wrong_output_count(layout, selection, consumer):
        counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
        return f'with it {counts} are selected, and prefill stops with "buffer count mismatch"'
    for selected_input, output in zip(inputs, outputs, strict=False):
        input_name = selected_input.value.name
        if input_name != output.graph_input_name:
            return (
                f"it shifts the pairing by position, and {output.value.name} goes to {input_name}"
            )
    return ""


def _explain_non_kv_effect(layout: Layout, selection: Selection) -> str:
    """Return what becomes of values that do no harm to the buffers."""
    inputs, outputs = selection.inputs, selection.outputs
    if len(outputs) > len(inputs):
        return "it comes last among the outputs, and is left out: only its name keeps it there"
    kv_inputs = [each for each in inputs if each.buffer is not None]
    if len(find_distinct_types(layout, kv_inputs)) <= 1 < len(find_distinct_types(layout, inputs)):
        return "its shape or dtype makes the buffers hybrid, which they are not"
    return "it is handed over with every prompt, as if it were a buffer"


def check_slice_ranks(consumer: Consumer, layout: Layout, full_transfer: bool) -> Iterator[Finding]:
    """Yield KV610 for a rank that the slices on the device do not have.

    They have four axes, with hybrid buffers also three. No document says what the device's
    runtime makes of another rank.
    """
    hybrid = is_hybrid(layout, consumer)
    ranks = (3, 4) if hybrid else (4,)
    for buffer in find_selected_buffers(layout, consumer):
        if buffer.shape and len(buffer.shape) not in ranks:
            yield build_finding(
                "KV610",
                buffer.names[0],
                f"has {_format_axis_count(len(buffer.shape))}, and is sliced as if it had "
                f"{ranks[0]}",
                "no option of vllm-qaic mends this",
            )
            return
    if hybrid:
        yield from _check_overlapping_slices(layout, consumer)


def _format_axis_count(count: int) -> str:
    return "1 axis" if count == 1 else f"{count} axes"


def _check_overlapping_slices(layout: Layout, consumer: Consumer) -> Iterator[Finding]:
    """Yield KV610 for outputs that match the slices of another one, which are ``NAME.*``."""
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
                f"begins like {base}, whose slices go by {base}.*: two expressions fit it, of "
                "different slices",
                "mend the templates in your rules (--rules FILE), so that no name begins another",
            )


CHECKS = (
    check_logits,
    check_truncated_buffers,
    check_uniform_types,
    check_declared_attention,
    check_non_kv_selected,
    check_slice_ranks,
)
CONSUMER = add_checks(
    Consumer(
        name="vllm-qaic",
        token=TOKEN,
        selects_input=selects_input,
        selects_output=selects_output,
        input_name_of=derive_input_name,
        sort_key=parse_sort_key,
        transferred_shape=compute_transferred_shape,
        is_appended_output=is_logits_output,
        itemsize_of=_ITEMSIZES.get,
        needs_in_place=True,
        selected_outputs=f"*{TOKEN}*RetainedState",
        alternative="vllm-qaic-legacy",
    ),
    *CHECKS,
)
