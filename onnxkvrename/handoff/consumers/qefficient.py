"""Describe QEfficient's own session with ``kv_dma_share=True``, which selects names by prefixes.

Source: quic/efficient-transformers, file ``QEfficient/generation/cloud_infer.py``:
``is_retained_state_name`` at ebf55e8, and the hand-off (``_init_kv_handoff``,
``set_data_for_kv_handoff``) in pull request 1150 at 3354081. The host makes an array for each KV
input of decode. Prefill's device writes its retained outputs into these arrays by position, as
slices of the whole buffer. None of this was tested on a device.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.findings import Finding, report_names
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumers import vllm_qaic
from onnxkvrename.handoff.selection import ConsumerView
from onnxkvrename.text import format_count

_PREFIXES = ("past_", "conv_state.", "recurrent_state.", "compressed_", "k_pe")
_LINEAR_PREFIXES = ("conv_state.", "recurrent_state.")
_NAMES = "past_*, conv_state.*, recurrent_state.*, compressed_* or k_pe*"
_NO_OPTION_HINT = "no option of QEfficient changes this"
_ITEMSIZES = {
    **dict.fromkeys(("INT8", "UINT8", "MXINT8"), 1),
    **dict.fromkeys(("FLOAT16", "BFLOAT16", "INT16"), 2),
    **dict.fromkeys(("FLOAT", "INT32"), 4),
    "INT64": 8,
}


def check_slice_ranks(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV610 for ranks that slices cannot have, also of values that are not KV buffers.

    Slices have four axes. If buffers differ in shape or dtype, slices of buffers with another rank
    have three. It is not documented how the device's runtime treats a different rank.
    """
    slice_rank = 3 if view.is_hybrid else 4
    groups: dict[int, list[str]] = {}
    for each in view.selection.inputs:
        rank = len(each.value.shape or ())
        if rank not in (0, 4, slice_rank):
            groups.setdefault(rank, []).append(each.value.name)
    for rank, names in groups.items():
        axes = format_count(rank, "axis", "axes")
        yield from report_names(
            "KV610",
            names,
            ("has", "have"),
            f"{axes}, but {view.consumer.name} slices for {slice_rank}",
            _NO_OPTION_HINT,
            "inputs",
        )


def check_non_kv_selected(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV608 for values that are not KV buffers, with the number that QEfficient counts."""
    inputs = view.selection.inputs
    count = sum(each.buffer is not None for each in inputs)
    for finding in vllm_qaic.check_non_kv_selected(view):
        if len(inputs) > count:
            buffers = format_count(len(inputs), "buffer")
            message = f"{finding.message}; it counts {buffers} instead of {count}"
            finding = finding._replace(message=message)
        yield finding


def check_uniform_states(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV610 for linear states if all buffers have one type: prefill leaves the states out."""
    if not view.is_hybrid:
        outputs = view.selection.outputs
        yield from report_names(
            "KV610",
            [each.value.name for each in outputs if each.input_name.startswith(_LINEAR_PREFIXES)],
            ("is", "are"),
            "left out: where all buffers have the same shape and dtype, prefill hands over no "
            'linear states and fails with "KV buffer count mismatch"',
            _NO_OPTION_HINT,
            "outputs",
        )


CONSUMER = Consumer(
    name="qefficient",
    token="",
    selects_input=lambda name: name.startswith(_PREFIXES),  # a scope (NAME/) is not skipped
    selects_output=lambda name: name.startswith(_PREFIXES) and name.endswith(vllm_qaic.SUFFIX),
    input_name_of=vllm_qaic.derive_input_name,
    sort_key=vllm_qaic.parse_sort_key,
    itemsize_of=_ITEMSIZES.get,
    selected_inputs=_NAMES,
    selected_outputs=f"{_NAMES}, with {vllm_qaic.SUFFIX} at the end",
    output_suffix=vllm_qaic.SUFFIX,
    unselected_hint="the prefixes are fixed in QEfficient: export the buffer with such a name",
    memory="separate",
    checks=(check_non_kv_selected, check_uniform_states, check_slice_ranks),
)
