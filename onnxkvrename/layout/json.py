"""A layout as JSON: what `inspect` writes of it, and strictly back, as the file is a stranger's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from onnxkvrename.documents import UnreadableTextError, parse_json
from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding
from onnxkvrename.layout.layout import (
    ByteTotals,
    KvBuffer,
    Layout,
    Shape,
    Sizes,
    compute_byte_totals,
    find_axis_and_window,
)
from onnxkvrename.limits import (
    MAX_BUFFERS,
    MAX_ENTRIES,
    MAX_RANK,
    describe_excess,
    shorten_text,
)
from onnxkvrename.model.signature import Dim, Value
from onnxkvrename.records import Spread, fill_record, read_record
from onnxkvrename.rules.plan import UnchangedName
from onnxkvrename.rules.results import ModelReport

SCHEMA_NAME = "onnxkvrename.inspect/"
SCHEMA = f"{SCHEMA_NAME}2"
"""Name and version of the documents of `inspect`, which hold layouts."""
_WRITE_HINT = "write it with `onnxkvrename inspect MODEL --format json`"


class SizedBuffer(NamedTuple):
    """A KV buffer, and its sizes as far as they are known.

    Attributes:
        buffer: The buffer.
        sized_shape: The shape with the sizes that are known.
        window_size: The window in tokens; `None` if there is none or its size is unknown.
        bytes_per_token: Bytes that a token adds to the buffer, for one sequence; `None` for a
            state, or where a size or a dtype is not known.
        bytes_per_state: Bytes of the state of one sequence; `None` if it grows, or likewise.
        bytes: Bytes of one sequence, at its full length; `None` likewise.
    """

    buffer: Annotated[KvBuffer, Spread()]
    sized_shape: Shape | None
    window_size: Dim
    bytes_per_token: int | None
    bytes_per_state: int | None
    bytes: int | None


class ModelFinding(NamedTuple):
    """A finding about one of the models.

    Attributes:
        model: The path of the model that it is about.
        finding: The finding.
    """

    model: str
    finding: Annotated[Finding, Spread()]


class LayoutContent(NamedTuple):
    """The KV buffers of a model, or of the windows of one, as a consumer sees them.

    Attributes:
        models: The models that make up the layout, in the order of their layers.
        layers: The numbers of the layers with buffers.
        sizes: The sizes of the symbols in the shapes of buffers.
        missing: Symbols in the shapes of buffers whose sizes are not known, the batch's aside.
        inputs: All inputs of the graphs.
        outputs: All outputs of the graphs.
        buffers: The buffers, by layer, then by part.
        kept: Inputs and outputs of the models whose names stay, each with the reason.
        totals: The bytes of all buffers.
        findings: What is wrong with the models, alone and together.
    """

    models: tuple[str, ...]
    layers: tuple[int, ...]
    sizes: Sizes
    missing: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    buffers: tuple[SizedBuffer, ...]
    kept: tuple[UnchangedName, ...]
    totals: ByteTotals
    findings: tuple[ModelFinding, ...]


class LayoutFile(NamedTuple):
    """The part of a document of `inspect` that is read back.

    Attributes:
        layouts: The layouts.
    """

    layouts: tuple[LayoutContent, ...]


def describe_layout(layout: Layout, reports: Sequence[ModelReport]) -> LayoutContent:
    """Return a layout as JSON has it.

    Args:
        layout: The layout.
        reports: The reports of its models, with their findings.
    """
    return fill_record(
        LayoutContent,
        layout,
        missing=layout.unresolved_symbols,
        buffers=tuple(_describe_buffer(layout, buffer) for buffer in layout.buffers),
        totals=compute_byte_totals(layout),
        findings=tuple(
            ModelFinding(report.path, finding) for report in reports for finding in report.findings
        ),
    )


def _describe_buffer(layout: Layout, buffer: KvBuffer) -> SizedBuffer:
    shape, window = buffer.shape, buffer.window
    return SizedBuffer(
        buffer,
        sized_shape=None if shape is None else layout.resolve_shape(shape),
        window_size=layout.sizes.get(window) if isinstance(window, str) else window,
        bytes_per_token=layout.compute_token_bytes(buffer),
        bytes_per_state=layout.compute_state_bytes(buffer),
        bytes=layout.compute_sequence_bytes(buffer),
    )


def parse_layout(text: str, path: str) -> tuple[Layout, tuple[Finding, ...]]:
    """Return the layout in a document of `inspect`, and what was wrong with its models.

    What can be computed, such as bytes, is not read. Members that this version does not know are
    ignored.

    Args:
        text: The text of the file.
        path: The path of the file, for messages.

    Raises:
        ModelError: The text is not strict JSON, or not a document of this version, or that of a
            job that failed; it has no layout, or several; or a value of it cannot be.
    """
    document = _read_document(text, path)
    try:
        layouts = read_record(LayoutFile, document).layouts
        if len(layouts) == 1:
            _check_content(layouts[0])
    except UnreadableTextError as error:
        raise ModelError(f"is not valid: {error}", path=path, hint=_WRITE_HINT) from None
    if len(layouts) > 1:
        raise ModelError(
            f"has the layouts of {len(layouts):,} models; pass a file of one",
            path=path,
            hint=_WRITE_HINT,
        )
    if not layouts:
        raise ModelError(
            "has no layout: its models have no KV buffers, or have two in one place",
            path=path,
            hint="`onnxkvrename inspect MODEL` says what is wrong",
        )
    (content,) = layouts
    return _build_layout(content), tuple(each.finding for each in content.findings)


def _read_document(text: str, path: str) -> dict[str, Any]:
    """Return the object of a document of `inspect` of this version, of a job that was done."""
    try:
        data = parse_json(text)
    except UnreadableTextError as error:
        raise ModelError(str(error), path=path) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if (
        not isinstance(data, dict)
        or not isinstance(schema, str)
        or not schema.startswith(SCHEMA_NAME)
    ):
        claim = f"is {shorten_text(schema)}" if isinstance(schema, str) else "has no schema"
        raise ModelError(f"is not a layout: it {claim}, not {SCHEMA}", path=path, hint=_WRITE_HINT)
    if schema != SCHEMA:
        raise ModelError(
            f"is {shorten_text(schema)}, but this version of onnxkvrename reads {SCHEMA}",
            path=path,
            hint="use the same version of onnxkvrename on both hosts",
        )
    if data.get("error") is not None or data.get("exit_code") == 2:
        raise ModelError(
            "is the output of an inspect command that failed", path=path, hint=_WRITE_HINT
        )
    return data


def _check_content(content: LayoutContent) -> None:
    """Check what the types of a layout do not say; its buffers must be those of its graphs.

    Raises:
        UnreadableTextError: A value cannot be, or there are more than a model may have.
    """
    for what, limit, values in (
        ("KV buffers", MAX_BUFFERS, content.buffers),
        ("inputs", MAX_ENTRIES, content.inputs),
        ("outputs", MAX_ENTRIES, content.outputs),
    ):
        if len(values) > limit:
            raise UnreadableTextError(describe_excess(limit, what))
    shapes = (
        *(value.shape for value in (*content.inputs, *content.outputs)),
        *(each.buffer.shape for each in content.buffers),
    )
    if any(len(shape or ()) > MAX_RANK for shape in shapes):
        raise UnreadableTextError(describe_excess(MAX_RANK, "dimensions in a shape"))
    if any(size < 1 for size in content.sizes.values()):
        raise UnreadableTextError("layouts[0].sizes: a size is 1 or more")
    models = set(content.models)
    names = tuple({value.name for value in side} for side in (content.inputs, content.outputs))
    places = set[tuple[int, str]]()
    for index, each in enumerate(content.buffers):
        for fault in _list_faults(each.buffer, models, *names):
            raise UnreadableTextError(f"layouts[0].buffers[{index}].{fault}")
        place = (each.buffer.layer, each.buffer.part)
        if place in places:
            raise UnreadableTextError(
                f"layouts[0].buffers[{index}].part: another buffer of this layer is the same part"
            )
        places.add(place)


def _list_faults(
    buffer: KvBuffer, models: set[str], inputs: set[str], outputs: set[str]
) -> Iterator[str]:
    """Yield the members of a buffer that contradict the rest, each with the reason."""
    if buffer.layer < 0:
        yield "layer: is less than 0"
    if buffer.model not in models:
        yield "model: is not one of the models"
    if not buffer.names:
        yield "input: is missing, and so is the output"
    if buffer.input is not None and buffer.input not in inputs:
        yield "input: is not one of the inputs"
    if buffer.output is not None and buffer.output not in outputs:
        yield "output: is not one of the outputs"
    if buffer.axes and buffer.shape is not None and len(buffer.axes) != len(buffer.shape):
        yield "axes: are not as many as the dimensions"
    axis_and_window = find_axis_and_window(buffer.kind, buffer.shape, buffer.axes)
    if axis_and_window != (buffer.sequence_axis, buffer.window):
        yield "sequence_axis: this or the window does not follow from kind, shape and axes"


def _build_layout(content: LayoutContent) -> Layout:
    return Layout(
        content.models,
        content.inputs,
        content.outputs,
        tuple(each.buffer for each in content.buffers),
        content.kept,
        MappingProxyType(content.sizes),
    )
