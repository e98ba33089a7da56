"""vllm-qaic, which moves buffers through shared memory, by position.

After qualcomm/vllm-qaic, at 10d331f: ``model_loader/qaic_session_np.py``
(what is selected, in which order, and how it is sliced on the device),
``distributed/kv_transfer/kv_connector/v1/qaic_connector.py`` (what is moved),
``worker/model_runner.py`` (what is declared, and what LMCache refuses). Nothing of
this was seen on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import (
    find_distinct_types,
    find_non_kv_selected,
    find_selected_buffers,
    format_similar_count,
    is_hybrid,
    select_values,
)
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.signature import format_shape

TOKEN = "vllmKvCache"
SUFFIX = "_RetainedState"
_CONTEXT_AXIS = 2
_ITEMSIZES = {
    **dict.fromkeys(("INT8", "UINT8", "MXINT8"), 1),
    "FLOAT16": 2,
    **dict.fromkeys(("FLOAT", "INT32"), 4),
    "INT64": 8,
}


def selects_input(name: str) -> bool:
    """Inputs are selected by the token alone, wherever it stands."""
    return TOKEN in name


def selects_output(name: str) -> bool:
    """Outputs are selected by the token and their end, an internal one included."""
    return TOKEN in name and name.endswith("RetainedState")


def derive_input_name(name: str) -> str:
    """An output goes by its name without the suffix; an internal one keeps its own."""
    return name.replace(SUFFIX, "")


def parse_sort_key(name: str) -> tuple[int, str]:
    """By layer, which stands behind the first dot and before an underscore, then by name.

    Without a dot the layer is 0. Raises ``ValueError`` where no number stands there.
    """
    parts = name.split(".")
    return int(parts[1].split("_")[0]) if len(parts) > 1 else 0, name


def compute_transferred_shape(shape: Shape, tokens: int | None) -> Shape:
    """One sequence; of a buffer with four axes or more the third only up to the prompt.

    That the third is the context is taken for granted, whatever it is.
    """
    if tokens is None or len(shape) <= _CONTEXT_AXIS + 1:
        return (1, *shape[1:])
    length = shape[_CONTEXT_AXIS]
    assert isinstance(length, int)
    return (1, shape[1], min(tokens, length), *shape[_CONTEXT_AXIS + 1 :])


def is_logits_output(name: str) -> bool:
    """What is meant are the logits."""
    return name.startswith("log")


def check_logits(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV604. Outputs that start with ``log`` are put behind the KV buffers, and one is taken off.

    The list that is left may then be one longer than the buffers, and no shorter.
    """
    names = [value.name for value in layout.outputs if is_logits_output(value.name)]
    if not names:
        yield build_finding(
            "KV604",
            "",
            "no output starts with log: in its place the last KV buffer is taken off, and "
            'prefill stops with "buffer count mismatch"',
            "export with logits, without sampling on the device; a model for decode alone needs "
            f"none, and --prefix {TOKEN} renames it",
        )
    elif len(names) > 1:
        yield build_finding(
            "KV604",
            names[1],
            f"starts with log, as {names[0]} does: {len(names)} outputs stand behind the KV "
            f"buffers, one is taken off, and {_describe_extra_outputs(len(names) - 1)}",
            "rename or drop every such output but the logits",
        )


def _describe_extra_outputs(count: int) -> str:
    if count > 1:
        return 'prefill stops with "buffer count mismatch"'
    return "the list has one entry more than there are buffers, which passes only by chance"


def check_truncated_buffers(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV605. Where there are four axes or more, the third is cut to the prompt's length.

    The connector does so with hybrid buffers and others, unless it moves the whole of each.
    """
    if whole:
        return
    found: dict[tuple[object, ...], list[str]] = {}
    for buffer in find_selected_buffers(layout, CONSUMER):
        if _is_truncated(buffer):
            assert buffer.input is not None
            assert buffer.shape is not None
            key = (buffer.kind, layout.resolve_shape(buffer.shape))
            found.setdefault(key, []).append(buffer.input)
    for (kind, shape), names in found.items():
        assert isinstance(shape, tuple)
        what = "is a state" if kind == "mamba" else "has its context on another axis"
        yield build_finding(
            "KV605",
            names[0],
            f"{what}, {format_shape(shape)}{format_similar_count(names)}: of a prompt of n tokens only the "
            f"first n along axis {_CONTEXT_AXIS} are moved, and the rest is lost where n is less "
            f"than {shape[_CONTEXT_AXIS]}",
            "set VLLM_QAIC_USE_FULL_KV_TRANSFER=1 on both sides, and check with --full-transfer",
        )


def _is_truncated(buffer: Buffer) -> bool:
    if buffer.shape is None or len(buffer.shape) <= _CONTEXT_AXIS + 1:
        return False
    return buffer.kind == "mamba" or buffer.sequence_axis not in (None, _CONTEXT_AXIS)


def check_uniform_types(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV606. The LMCache connector takes one shape and dtype only, and asserts it at start."""
    values = [value for value in layout.inputs if selects_input(value.name)]
    count = len(find_distinct_types(layout, values))
    if count > 1:
        yield build_finding(
            "KV606",
            "",
            f"{count} different shapes or dtypes: hybrid, which QaicLMCacheConnectorV1 refuses "
            "at start",
            "hand over with QaicConnector",
        )


def check_declared_attention(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV607. Every layer is declared as full attention, of one count and one size of heads."""
    buffers = [
        buffer for buffer in find_selected_buffers(layout, CONSUMER) if buffer.kind != "unknown"
    ]
    others = [buffer for buffer in buffers if buffer.kind != "full_attention"]
    if others:
        kinds = format_list(sorted({buffer.kind for buffer in others}))
        yield build_finding(
            "KV607",
            others[0].names[0],
            f"is {others[0].kind}, one of {len(others)} such buffers ({kinds}): every layer is "
            "declared as full_attention, and vLLM counts blocks and bytes accordingly",
            "do not size memory by vLLM's numbers for this model",
        )
    heads = {
        buffer.shape[1]: buffer
        for buffer in buffers
        if buffer.kind != "mamba" and buffer.shape is not None and len(buffer.shape) == 4
    }
    if len(heads) > 1:
        _, buffer = heads.popitem()
        counts = format_list([str(count) for count in (*heads, (buffer.shape or ())[1])])
        yield build_finding(
            "KV607",
            buffer.names[0],
            f"has other heads than most: there are {counts}, and every layer is declared alike",
            "do not size memory by vLLM's numbers for this model",
        )


def check_non_kv_selected(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV608, with what the stranger does to the buffers of this very model."""
    found = find_non_kv_selected(layout, CONSUMER)
    if found:
        names = [value.name for value in found]
        yield build_finding(
            "KV608",
            names[0],
            f"carries {TOKEN}, and is no KV buffer{format_similar_count(names)}: {_explain_non_kv_effect(layout, found[0].name)}",
            f"take {TOKEN} out of that name where the model is exported",
        )


def _explain_non_kv_effect(layout: Layout, name: str) -> str:
    chosen = select_values(layout, CONSUMER)
    inputs, outputs = len(chosen.inputs), len(chosen.outputs)
    if not chosen.ordered:
        return "no layer can be read in one of the names, and it cannot start"
    if outputs not in (inputs, inputs + 1):
        said = f"{inputs} inputs and {outputs} outputs"
        return f'with it {said} are selected, and prefill stops with "buffer count mismatch"'
    for number, value in enumerate(chosen.inputs):
        if value.name != chosen.partner_names[number]:
            other = chosen.outputs[number].name
            return f"it shifts the pairing by position, and {other} goes to {value.name}"
    if outputs > inputs:
        return "it comes last among the outputs, and is left out: only its name keeps it there"
    alone = [value for value in chosen.inputs if value.name in _collect_buffer_names(layout)]
    if (
        len(find_distinct_types(layout, chosen.inputs))
        > 1
        >= len(find_distinct_types(layout, alone))
    ):
        return "its shape or dtype makes the buffers hybrid, which they are not"
    return "it is handed over with every prompt, as if it were a buffer"


def _collect_buffer_names(layout: Layout) -> frozenset[str]:
    return frozenset(name for buffer in layout.buffers for name in buffer.names)


def check_slice_ranks(layout: Layout, whole: bool) -> Iterator[Finding]:
    """KV610. Slices on the device have four axes; with hybrid buffers also three, for all others.

    What the device's runtime makes of another rank is not documented.
    """
    hybrid = is_hybrid(layout, CONSUMER)
    ranks = (3, 4) if hybrid else (4,)
    for buffer in find_selected_buffers(layout, CONSUMER):
        if buffer.shape and len(buffer.shape) not in ranks:
            assert buffer.input is not None
            yield build_finding(
                "KV610",
                buffer.input,
                f"has {_format_axis_count(len(buffer.shape))}, and is sliced as if it had {ranks[0]}",
                "no option of vllm-qaic mends this",
            )
            return
    if hybrid:
        yield from _check_overlapping_slices(layout)


def _format_axis_count(count: int) -> str:
    return "1 axis" if count == 1 else f"{count} axes"


def _check_overlapping_slices(layout: Layout) -> Iterator[Finding]:
    """KV610. Each hybrid buffer has its slices under ``NAME.*``, which may take another's name."""
    outputs = (value for value in layout.outputs if selects_output(value.name))
    bases = sorted(
        ((derive_input_name(value.name), value) for value in outputs), key=lambda pair: pair[0]
    )
    for (base, value), (other, longer) in pairwise(bases):
        alike = {(len(v.shape or ()), CONSUMER.itemsize_of(v.dtype)) for v in (value, longer)}
        if other.startswith(base) and len(alike) > 1:
            yield build_finding(
                "KV610",
                longer.name,
                f"begins like {base}, whose slices go by {base}.*: two expressions fit it, of "
                "different slices",
                "mend the templates in your rules (--rules FILE), so that no name begins another",
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
    itemsize_of=_ITEMSIZES.get,
    checks=(
        check_logits,
        check_truncated_buffers,
        check_uniform_types,
        check_declared_attention,
        check_non_kv_selected,
        check_slice_ranks,
    ),
)
