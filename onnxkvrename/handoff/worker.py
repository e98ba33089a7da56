"""Describe one side of a hand-off, prefill or decode, with the names that the consumer sees."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.findings import Finding
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.slots import find_clipped_axes
from onnxkvrename.layout.layout import Layout, apply_sizes, list_symbols
from onnxkvrename.layout.load import LoadedLayout
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request

BufferOrder = Literal["numeric", "lexical", "graph"]
"""The order of buffers in a graph: by layer, by name as text, or neither."""

_ORDER_NAMES = {"numeric": "by layer", "lexical": "by name", "graph": "in an order of its own"}

UNLIMITED_LENGTH = 1 << 31
"""A prompt length in tokens that no graph limits, longer than any size that can be given."""
UNKNOWN_SIZE = 1 << 50
"""A placeholder for a size that is not known, longer than any prompt."""
HAS_NO_BUFFER = " has no KV buffer"
"""What is said of a side, before the reason."""


@show_briefly
class HandoffSide(NamedTuple):
    """One side of a hand-off.

    Attributes:
        label: ``prefill`` or ``decode``.
        original_layout: The layout with the names of the graphs.
        lacks_token: Whether the consumer selects none of the original names. If it has a token,
            `layout` then has the names after a rename.
        tokens: The infix tokens of the original names, in alphabetical order.
        order: The order in which the graph lists its buffers.
        rename: The rename of its models: of its path, or of the models of a layout file.
        path: The model, directory or layout file that was read; empty for what is in memory.
        model_finding: The first error of its models, without those about the consumer.
    """

    label: str
    original_layout: Layout
    layout: Layout
    lacks_token: bool
    tokens: tuple[str, ...]
    order: BufferOrder
    rename: Request = Request()
    path: str = ""
    model_finding: Finding | None = None


def build_loaded_side(
    label: str, path: Path | None, loaded: LoadedLayout, consumer: Consumer, rules: Rules
) -> HandoffSide:
    """Return a side with its path, if it has one, and the first error of its models.

    A model without buffers beside one that has some is not an error.
    """
    findings = (finding for report in loaded.reports for finding in report.findings)
    model_errors = (
        finding
        for finding in findings
        if finding.severity == "error"
        and finding.code < "KV600"  # what concerns the consumer is reported elsewhere
        and not (finding.code == "KV001" and loaded.layout.buffers)
    )
    side = build_handoff_side(label, loaded.layout, consumer, rules)
    is_file = path is None or path.suffix == ".json" or len(loaded.reports) == 1
    if path is not None and not is_file:
        side = side._replace(rename=side.rename._replace(models=(path,)))
    return side._replace(path=str(path or ""), model_finding=next(model_errors, None))


def build_handoff_side(label: str, layout: Layout, consumer: Consumer, rules: Rules) -> HandoffSide:
    """Return a side, with the names after a rename if the consumer selects none of them now."""
    names = [buffer.input for buffer in layout.buffers if buffer.input is not None]
    lacks_token = not any(map(consumer.selects_input, names))
    plan = build_rename_plan(Signature(layout.inputs, layout.outputs), rules, TokenChange(None))
    return HandoffSide(
        label,
        layout,
        rename_for_consumer(layout, consumer, rules) if lacks_token else layout,
        lacks_token,
        tuple(sorted(plan.token_counts)),
        _detect_order(layout),
        Request(tuple(map(Path, layout.models)), rules=rules),
    )


def rename_for_consumer(layout: Layout, consumer: Consumer, rules: Rules) -> Layout:
    """Return a layout with the names after a rename for a consumer; as it is without a token."""
    if not consumer.token:
        return layout
    change = TokenChange(consumer.token, replace=True)
    signature = Signature(layout.inputs, layout.outputs)
    name_map = build_rename_plan(signature, rules, change).name_map

    def rename_value(value: Value) -> Value:
        return value._replace(name=name_map.get(value.name, value.name))

    def rename(name: str | None) -> str | None:
        return None if name is None else name_map.get(name, name)

    return layout._replace(
        inputs=tuple(map(rename_value, layout.inputs)),
        outputs=tuple(map(rename_value, layout.outputs)),
        buffers=tuple(
            buffer._replace(input=rename(buffer.input), output=rename(buffer.output))
            for buffer in layout.buffers
        ),
    )


def _detect_order(layout: Layout) -> BufferOrder:
    owners = {buffer.input: buffer for buffer in layout.buffers}
    names = [value.name for value in layout.inputs if value.name in owners]
    layers = [owners[name].layer for name in names]
    if layers == sorted(layers):
        return "numeric"
    return "lexical" if names == sorted(names) else "graph"


def find_longest_prompt(layout: Layout) -> int:
    """Return the longest prompt in tokens that a side has room for.

    Windows, states and an encoder's buffers do not limit it. For a context of unknown size, it is
    `UNLIMITED_LENGTH`.
    """
    sizes = []
    for buffer in layout.buffers:
        shape = layout.resolve_shape(buffer.shape or ())
        if buffer.prompt_axis is not None and buffer.window is None:
            sizes.append(shape[buffer.prompt_axis])
        elif buffer.kind == "unknown" and len(shape) > 3 and not buffer.has_no_prompt_axis:
            sizes.append(shape[2])
    known_sizes = [size for size in sizes if isinstance(size, int)]
    return max(known_sizes) if known_sizes and len(known_sizes) == len(sizes) else UNLIMITED_LENGTH


def fill_missing_sizes(layout: Layout, window_size: int | None = None) -> Layout:
    """Return the layout with a size for every symbol.

    A window without one gets `window_size`; without that, it gets `UNKNOWN_SIZE` as all other
    symbols do.
    """
    symbols = list_symbols(value.shape for value in layout.inputs)
    sizes = {symbol: UNKNOWN_SIZE for symbol in symbols if symbol not in layout.sizes}
    if window_size is not None:
        windows = {buffer.window for buffer in layout.buffers}
        sizes |= {symbol: window_size for symbol in sizes if symbol in windows}
    return apply_sizes(layout, sizes)


def find_shared_symbols(
    sides: Iterable[HandoffSide], consumer: Consumer, full_transfer: bool
) -> tuple[str, ...]:
    """Return the symbols without a size that must be equal on both sides, alphabetically.

    A context that is moved only up to the prompt's length may differ between the sides.
    """
    shared = set[str]()
    for layout, buffer in ((side.layout, b) for side in sides for b in side.layout.buffers):
        shape = layout.resolve_shape(buffer.shape or ())
        clipped = find_clipped_axes(consumer, len(shape), full_transfer)
        for axis, dim in enumerate(shape[1:], 1):
            is_context = axis == buffer.prompt_axis and buffer.window is None
            is_free = axis in clipped and is_context
            if isinstance(dim, str) and not is_free:
                shared.add(dim)
    return tuple(sorted(shared))


def list_order_notes(prefill: HandoffSide, decode: HandoffSide, consumer: Consumer) -> list[str]:
    """Return a note if the graphs list their buffers in different orders, which is harmless."""
    if prefill.order == decode.order:
        return []
    return [
        f"the graphs list their buffers in different orders, prefill {_ORDER_NAMES[prefill.order]} "
        f"and decode {_ORDER_NAMES[decode.order]}; {consumer.name} sorts them itself, so this is "
        "harmless"
    ]
