"""Convert a layout to a manifest, a JSON document that replaces the model, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from onnxkvrename.documents import ObjectReader, UnreadableTextError, parse_json
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding, Severity, build_json_document, serialize_finding
from onnxkvrename.layout.kinds import list_kinds
from onnxkvrename.layout.layout import (
    KvBuffer,
    Layout,
    Shape,
    compute_layout_digest,
    find_axis_and_window,
)
from onnxkvrename.layout.scales import BufferScales, Scale
from onnxkvrename.layout.updates import UNTRACED_UPDATE, UPDATE_KINDS, BufferUpdate
from onnxkvrename.limits import shorten_text
from onnxkvrename.model.signature import Value
from onnxkvrename.model.weights import Weight
from onnxkvrename.rules.plan import UnchangedName
from onnxkvrename.rules.profile import ProfileChoice, serialize_choice
from onnxkvrename.rules.results import ModelReport

SCHEMA = "onnxkvrename.manifest/1"
_REWRITE_HINT = "write it again from its model, with the command manifest"


class Manifest(NamedTuple):
    """The content of a manifest.

    Attributes:
        layout: The layout of its models.
        findings: The problems that its models had.
        stamp: The digest in the metadata of its models, ``None`` for none.
    """

    layout: Layout
    findings: tuple[Finding, ...]
    stamp: str | None


class ByteTotals(NamedTuple):
    """Bytes of all buffers together; ``None`` where a size or a dtype is not known.

    Attributes:
        context: Bytes that a token adds to buffers that grow with the context.
        window: Bytes that a token adds to buffers that hold a window of it.
        encoder: Bytes that a token of the encoder adds to cross attention.
        states: Bytes of the states of one sequence.
        sequence: Bytes of one sequence at its full length.
        batch: Bytes of all sequences at their full length.
    """

    context: int | None
    window: int | None
    encoder: int | None
    states: int | None
    sequence: int | None
    batch: int | None


def compute_byte_totals(layout: Layout) -> ByteTotals:
    """Return the bytes of all buffers together."""
    growing: dict[str, list[int | None]] = {"context": [], "window": [], "encoder": []}
    for buffer in layout.buffers:
        if buffer.sequence_axis is not None:
            growing[classify_growth(buffer)].append(layout.compute_token_bytes(buffer))
    states = [layout.compute_state_bytes(buffer) for buffer in layout.buffers if buffer.is_state]
    return ByteTotals(
        **{name: _sum_if_known(sizes) for name, sizes in growing.items()},
        states=_sum_if_known(states),
        sequence=_sum_if_known(map(layout.compute_sequence_bytes, layout.buffers)),
        batch=_sum_if_known(map(layout.compute_batch_bytes, layout.buffers)),
    )


def classify_growth(buffer: KvBuffer) -> str:
    """Return what makes a buffer longer: ``context``, ``window``, ``encoder``, or empty."""
    if buffer.sequence_axis is None:
        return ""
    growth = buffer.traits.grows_with
    return "window" if growth == "context" and buffer.window is not None else growth


def _sum_if_known(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def compute_kv_layout_sha256(layout: Layout) -> str | None:
    """Return the digest of a layout, ``None`` without buffers: it is then equal to no other."""
    return compute_layout_digest(layout) if layout.buffers else None


def manifest_to_json(
    layout: Layout,
    reports: Sequence[ModelReport],
    code: int,
    fault: KvRenameError | None = None,
    *,
    stamp: str | None = None,
    vllm: Mapping[str, Any] | None = None,
    profile: ProfileChoice | None = None,
) -> str:
    """Return the document, which the tests validate against ``schemas/manifest-1.json``.

    Args:
        layout: The layout of the models.
        reports: The reports of the models, with their findings.
        code: The exit code of the command.
        fault: Why the command failed, ``None`` if it did not.
        stamp: The digest in the metadata of the models.
        vllm: A projection, as JSON.
        profile: The profile that recognized KV names.
    """
    content = {
        "profile": serialize_choice(profile),
        "models": list(layout.models),
        "kv_layout_sha256": compute_kv_layout_sha256(layout),
        "stamp": stamp,
        "layers": list(layout.layers),
        "sizes": dict(layout.sizes),
        "compiled_dtypes": layout.has_compiled_dtypes,
        "kv_cache_dtype": layout.kv_cache_dtype,
        "missing": list(layout.unresolved_symbols),
        "inputs": [_serialize_value(value) for value in layout.inputs],
        "outputs": [_serialize_value(value) for value in layout.outputs],
        "buffers": [_serialize_buffer(layout, buffer) for buffer in layout.buffers],
        "kept": [kept._asdict() for kept in layout.kept],
        "weights": None
        if layout.weights is None
        else [{**each._asdict(), "shape": list(each.shape)} for each in layout.weights],
        "totals": _serialize_totals(layout),
        "findings": [
            {"model": report.path, **serialize_finding(finding)}
            for report in reports
            for finding in report.findings
        ],
        "vllm": vllm,
    }
    values = build_json_document(SCHEMA, "manifest", code, fault, **content)
    return json.dumps({**values, "sha256": compute_document_digest(values)}, indent=2)


def compute_document_digest(values: Mapping[str, Any]) -> str:
    """Return the digest of a whole document, which shows any later change.

    Returns:
        SHA-256, in hexadecimal, of the document without its ``sha256``, as JSON with the keys
        of each object sorted, without blanks and in ASCII.
    """
    content = {key: value for key, value in values.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode("ascii")).hexdigest()


def _serialize_value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": _serialize_shape(value.shape)}


def _serialize_buffer(layout: Layout, buffer: KvBuffer) -> dict[str, Any]:
    shape, window = buffer.shape, buffer.window
    size = layout.sizes.get(window) if isinstance(window, str) else window
    return {
        "layer": buffer.layer,
        "part": buffer.part,
        "kind": buffer.kind,
        "kind_guessed": buffer.is_kind_guessed,
        "update": buffer.update.kind,
        "update_axis": buffer.update.axis,
        "buffer": buffer.buffer,
        "scope": buffer.scope,
        "input": buffer.input,
        "output": buffer.output,
        "token": buffer.token,
        "dtype": buffer.dtype,
        "shape": _serialize_shape(shape),
        "sized_shape": None if shape is None else _serialize_shape(layout.resolve_shape(shape)),
        "axes": list(buffer.axes),
        "beside": buffer.beside,
        "scales": None if buffer.scales is None else _serialize_scales(buffer.scales),
        "sequence_axis": buffer.sequence_axis,
        "window": window,
        "window_size": size,
        "bytes_per_token": layout.compute_token_bytes(buffer),
        "bytes_per_state": layout.compute_state_bytes(buffer),
        "bytes": layout.compute_sequence_bytes(buffer),
        "model": buffer.model,
    }


def _serialize_scales(scales: BufferScales) -> dict[str, Any]:
    return {
        name: None if values is None else [scale._asdict() for scale in values]
        for name, values in scales._asdict().items()
    }


def _serialize_shape(shape: Shape | None) -> list[Any] | None:
    return None if shape is None else list(shape)


def _serialize_totals(layout: Layout) -> dict[str, Any]:
    totals = compute_byte_totals(layout)
    return {
        "bytes_per_token": {
            "context": totals.context,
            "window": totals.window,
            "encoder": totals.encoder,
        },
        "state_bytes": totals.states,
        "sequence_bytes": totals.sequence,
        "batch_bytes": totals.batch,
    }


def parse_manifest(text: str, path: str) -> Manifest:
    """Return the content of a manifest.

    Args:
        text: The text of the file.
        path: The path of the file, for messages.

    Raises:
        ModelError: The text is not strict JSON or not a manifest, has another schema, was
            changed after it was written, contradicts itself, or has a digest that is not that
            of its buffers.
    """
    data = _parse_sealed_document(text, path)
    try:
        manifest = _parse_content(ObjectReader(data))
    except UnreadableTextError as error:
        raise ModelError(f"is not valid: {error}", path=path, hint=_REWRITE_HINT) from None
    if data.get("kv_layout_sha256") != compute_kv_layout_sha256(manifest.layout):
        raise ModelError(
            "has a kv_layout_sha256 that does not match its buffers", path=path, hint=_REWRITE_HINT
        )
    return manifest


def _parse_sealed_document(text: str, path: str) -> dict[str, Any]:
    """Return the object of a document with this schema whose digest is right."""
    try:
        data = parse_json(text)
    except UnreadableTextError as error:
        raise ModelError(str(error), path=path) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(data, dict) or schema != SCHEMA:
        claim = f"is {shorten_text(schema)}" if isinstance(schema, str) else "has no schema"
        raise ModelError(
            f"is not a manifest: it {claim}, not {SCHEMA}", path=path, hint=_REWRITE_HINT
        )
    if data.get("error") is not None:
        raise ModelError(
            "is the output of a manifest command that failed", path=path, hint=_REWRITE_HINT
        )
    if data.get("sha256") != compute_document_digest(data):
        raise ModelError(
            "was changed after it was written: its sha256 does not match its content",
            path=path,
            hint=f"{_REWRITE_HINT}; sizes are given with --dim",
        )
    return data


def _parse_content(document: ObjectReader) -> Manifest:
    sizes = document.read_object("sizes")
    layout = Layout(
        models=tuple(document.read_strings("models")),
        inputs=tuple(map(_parse_value, document.read_objects("inputs"))),
        outputs=tuple(map(_parse_value, document.read_objects("outputs"))),
        buffers=tuple(map(_parse_buffer, document.read_objects("buffers"))),
        kept=tuple(
            UnchangedName(entry.read_string("name"), entry.read_string("reason"))
            for entry in document.read_objects("kept")
        ),
        sizes=MappingProxyType(
            {symbol: sizes.read_integer(symbol, minimum=1) for symbol in sizes.values}
        ),
        weights=_parse_weights(document),
        has_compiled_dtypes=document.read_boolean("compiled_dtypes", default=False),
        kv_cache_dtype=None
        if document.is_null("kv_cache_dtype")
        else document.read_string("kv_cache_dtype"),
    )
    _check_buffers(layout)
    findings = tuple(map(_parse_finding, document.read_objects("findings")))
    return Manifest(layout, findings, document.read_string_or_null("stamp"))


def _check_buffers(layout: Layout) -> None:
    """Raise for buffers that contradict other parts of the manifest.

    The layout's digest does not cover everything in a buffer.
    """
    input_shapes, output_shapes = (
        {value.name: value.shape for value in reversed(values)}
        for values in (layout.inputs, layout.outputs)
    )
    models = frozenset(layout.models)
    for buffer in layout.buffers:
        is_named = buffer.input is None or buffer.input in input_shapes
        if not is_named or not (buffer.output is None or buffer.output in output_shapes):
            raise UnreadableTextError("a buffer has a name that is not an input or output")
        sides = ((buffer.input, input_shapes), (buffer.output, output_shapes))
        shapes = [shape_by_name[name] for name, shape_by_name in sides if name is not None]
        if not shapes or buffer.shape != next((s for s in shapes if s is not None), None):
            raise UnreadableTextError("a buffer has a shape that its input and output do not have")
        if buffer.model not in models:
            raise UnreadableTextError("a buffer belongs to a model that is not listed")


def _parse_value(entry: ObjectReader) -> Value:
    return Value(entry.read_string("name"), entry.read_string("dtype"), _parse_shape(entry))


def _parse_buffer(entry: ObjectReader) -> KvBuffer:
    kind, shape = entry.read_choice("kind", list_kinds()), _parse_shape(entry)
    axis, window = entry.read_integer_or_null("sequence_axis"), entry.read_string_or_null("window")
    axes = tuple(entry.read_strings("axes", default=[]))
    if axes and len(axes) != len(shape or axes):
        raise entry.build_error("axes", "must have one word for each size of the shape")
    if (axis, window) != find_axis_and_window(kind, shape, axes):
        raise UnreadableTextError(
            "a buffer has a sequence_axis or a window that its shape does not have"
        )
    return KvBuffer(
        layer=entry.read_integer("layer"),
        part=entry.read_string("part"),
        kind=kind,
        buffer=entry.read_string("buffer"),
        scope=entry.read_string("scope"),
        input=entry.read_string_or_null("input"),
        output=entry.read_string_or_null("output"),
        dtype=entry.read_string("dtype"),
        shape=shape,
        sequence_axis=axis,
        window=window,
        model=entry.read_string("model"),
        token=entry.read_string_or_null("token"),
        is_kind_guessed=entry.read_boolean("kind_guessed", default=False),
        update=_parse_update(entry),
        axes=axes,
        beside=entry.read_string("beside", default=""),
        scales=_parse_scales(entry),
    )


def _parse_scales(entry: ObjectReader) -> BufferScales | None:
    """Return the scales of a buffer; `None` in a manifest without them."""
    if "scales" not in entry.values or entry.is_null("scales"):
        return None
    scales = entry.read_object("scales")
    written, read = (
        None if scales.is_null(name) else tuple(map(_parse_scale, scales.read_objects(name)))
        for name in BufferScales._fields
    )
    return BufferScales(written, read)


def _parse_scale(entry: ObjectReader) -> Scale:
    return Scale(
        entry.read_string("dtype"),
        tuple(entry.read_list("shape", "a list of sizes", int)),
        entry.read_number("first"),
        entry.read_number("zero_point"),
        entry.read_string("sha256"),
    )


def _parse_update(entry: ObjectReader) -> BufferUpdate:
    """Return how a buffer is updated; a manifest that does not say it was written untraced."""
    if "update" not in entry.values:
        return UNTRACED_UPDATE
    axis = entry.read_integer_or_null("update_axis")
    if axis is not None and axis < 0:
        raise entry.build_error("update_axis", "is less than 0")
    return BufferUpdate(entry.read_choice("update", UPDATE_KINDS), axis)


def _parse_weights(document: ObjectReader) -> tuple[Weight, ...] | None:
    """Return the weights; `None` in a manifest without them."""
    if "weights" not in document.values or document.is_null("weights"):
        return None
    return tuple(
        Weight(
            entry.read_string("name"),
            entry.read_string("dtype"),
            tuple(entry.read_list("shape", "a list of sizes", int)),
            entry.read_string_or_null("sha256"),
        )
        for entry in document.read_objects("weights")
    )


def _parse_finding(entry: ObjectReader) -> Finding:
    severity: Severity = entry.read_choice("severity", get_args(Severity))
    code, name, message, hint = map(entry.read_string, ("code", "name", "message", "hint"))
    return Finding(code, severity, name, message, hint)


def _parse_shape(entry: ObjectReader) -> Shape | None:
    if "shape" in entry.values and entry.is_null("shape"):
        return None
    description = "a list of sizes and symbols, or null"
    return tuple(entry.read_list("shape", description, int, str, type(None)))
