"""The manifest: a layout as a JSON document, which stands for the model elsewhere, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding, Severity, build_json_document, serialize_finding
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.kinds import BufferKind
from onnxkvrename.layout.layout import Buffer, Layout, compute_layout_digest, find_axis_and_window
from onnxkvrename.model.signature import Value
from onnxkvrename.rules.plan import UnchangedName
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.sidecars.text_edit import UnreadableTextError, shorten_name

SCHEMA = "onnxkvrename.manifest/1"
_REWRITE_HINT = "onnxkvrename manifest MODEL -o FILE writes it again"
_NONE_TYPE = type(None)
_WINDOW_KINDS = ("sliding_window", "sliding_window_mla", "chunked_local_attention")


class Manifest(NamedTuple):
    """What a manifest says: the layout, what was wrong with its models, the stamp they carry."""

    layout: Layout
    findings: tuple[Finding, ...]
    stamp: str | None


class ByteTotals(NamedTuple):
    """Bytes of all buffers; ``None`` where a size or a dtype is not known.

    The first three are what a token adds: to what grows with the context, to what
    holds a window of it, and, a token of the encoder's, to cross attention.
    ``states`` are those of one sequence. ``sequence`` is all of one sequence at its
    full length, ``batch`` all of all sequences.
    """

    context: int | None
    window: int | None
    encoder: int | None
    states: int | None
    sequence: int | None
    batch: int | None


def compute_byte_totals(layout: Layout) -> ByteTotals:
    """What the buffers come to together."""
    growing: dict[str, list[int | None]] = {"context": [], "window": [], "encoder": []}
    for buffer in layout.buffers:
        if buffer.sequence_axis is not None:
            growing[classify_growth(buffer)].append(layout.compute_token_bytes(buffer))
    states = [layout.compute_state_bytes(b) for b in layout.buffers if b.kind == "mamba"]
    return ByteTotals(
        **{name: _sum_if_known(sizes) for name, sizes in growing.items()},
        states=_sum_if_known(states),
        sequence=_sum_if_known(map(layout.compute_sequence_bytes, layout.buffers)),
        batch=_sum_if_known(map(layout.compute_batch_bytes, layout.buffers)),
    )


def classify_growth(buffer: Buffer) -> str:
    """What a buffer grows with: the ``context``, a ``window`` of it, the ``encoder``; or not."""
    if buffer.sequence_axis is None:
        return ""
    if buffer.kind == "cross_attention":
        return "encoder"
    return "window" if buffer.window is not None or buffer.kind in _WINDOW_KINDS else "context"


def _sum_if_known(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def compute_kv_layout_sha256(layout: Layout) -> str | None:
    """The digest of a layout; ``None`` for one without buffers, which is like no other."""
    return compute_layout_digest(layout) if layout.buffers else None


def manifest_to_json(
    layout: Layout,
    reports: Sequence[ModelReport],
    code: int,
    fault: KvRenameError | None = None,
    *,
    stamp: str | None = None,
    vllm: Mapping[str, Any] | None = None,
) -> str:
    """One document, held against ``schemas/manifest-1.json`` by the tests.

    ``stamp`` is what the models carry in their metadata, ``vllm`` a projection.
    """
    content = {
        "models": list(layout.models),
        "kv_layout_sha256": compute_kv_layout_sha256(layout),
        "stamp": stamp,
        "layers": list(layout.layers),
        "sizes": dict(layout.sizes),
        "missing": list(layout.unresolved_symbols),
        "inputs": [_serialize_value(value) for value in layout.inputs],
        "outputs": [_serialize_value(value) for value in layout.outputs],
        "buffers": [_serialize_buffer(layout, buffer) for buffer in layout.buffers],
        "kept": [kept._asdict() for kept in layout.kept],
        "totals": _serialize_totals(layout),
        "findings": [
            {"model": report.path, **serialize_finding(found)}
            for report in reports
            for found in report.findings
        ],
        "vllm": vllm,
    }
    values = build_json_document(SCHEMA, "manifest", code, fault, **content)
    return json.dumps({**values, "sha256": compute_document_digest(values)}, indent=2)


def compute_document_digest(values: Mapping[str, Any]) -> str:
    """The digest of a whole document, by which a later change of anything in it is seen.

    SHA-256, in hexadecimal, over the document without its ``sha256`` as JSON with the keys
    of each object sorted, without blanks and in ASCII.
    """
    rest = {key: value for key, value in values.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode("ascii")).hexdigest()


def _serialize_value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": _serialize_shape(value.shape)}


def _serialize_buffer(layout: Layout, buffer: Buffer) -> dict[str, Any]:
    shape, window = buffer.shape, buffer.window
    size = layout.sizes.get(window) if isinstance(window, str) else window
    return {
        "layer": buffer.layer,
        "part": buffer.part,
        "kind": buffer.kind,
        "buffer": buffer.buffer,
        "scope": buffer.scope,
        "input": buffer.input,
        "output": buffer.output,
        "token": buffer.token,
        "dtype": buffer.dtype,
        "shape": _serialize_shape(shape),
        "sized_shape": None if shape is None else _serialize_shape(layout.resolve_shape(shape)),
        "sequence_axis": buffer.sequence_axis,
        "window": window,
        "window_size": size,
        "bytes_per_token": layout.compute_token_bytes(buffer),
        "bytes_per_state": layout.compute_state_bytes(buffer),
        "bytes": layout.compute_sequence_bytes(buffer),
        "model": buffer.model,
    }


def _serialize_shape(shape: Shape | None) -> list[Any] | None:
    return None if shape is None else list(shape)


def _serialize_totals(layout: Layout) -> dict[str, Any]:
    found = compute_byte_totals(layout)
    return {
        "bytes_per_token": {
            "context": found.context,
            "window": found.window,
            "encoder": found.encoder,
        },
        "state_bytes": found.states,
        "sequence_bytes": found.sequence,
        "batch_bytes": found.batch,
    }


def parse_manifest(text: str, path: str) -> Manifest:
    """What the text of a manifest says; ``path`` is what messages call it.

    Raises :class:`ModelError` for what is no manifest, for one of another schema, for one
    that was changed after it was written, for one that contradicts itself, and for one whose
    layout's digest is not that of its buffers.
    """
    try:
        data = json.loads(text)
        sealed = isinstance(data, dict) and data.get("sha256") == compute_document_digest(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"is not JSON: {error}", path=path) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        said = f"is {shorten_name(schema)}" if isinstance(schema, str) else "says no schema"
        raise ModelError(f"is no manifest: it {said}, not {SCHEMA}", path=path, hint=_REWRITE_HINT)
    if data.get("error") is not None:
        raise ModelError("is the answer of a manifest that failed", path=path, hint=_REWRITE_HINT)
    if not sealed:
        raise ModelError(
            "was changed after it was written: its sha256 is not that of what it says",
            path=path,
            hint=f"{_REWRITE_HINT}; sizes are given with --dim",
        )
    try:
        found = _parse_document(data)
    except UnreadableTextError as error:
        raise ModelError(f"is no whole manifest: {error}", path=path, hint=_REWRITE_HINT) from None
    if data.get("kv_layout_sha256") != compute_kv_layout_sha256(found.layout):
        raise ModelError(
            "has a kv_layout_sha256 that is not that of its buffers", path=path, hint=_REWRITE_HINT
        )
    return found


def _parse_document(data: Mapping[str, Any]) -> Manifest:
    sizes = _read_field(data, "sizes", dict)
    if any(_read_field(sizes, symbol, int) < 1 for symbol in sizes):
        raise UnreadableTextError("a size is less than 1")
    layout = Layout(
        models=tuple(_read_strings(data, "models")),
        inputs=tuple(_parse_value(entry) for entry in _read_objects(data, "inputs")),
        outputs=tuple(_parse_value(entry) for entry in _read_objects(data, "outputs")),
        buffers=tuple(_parse_buffer(entry) for entry in _read_objects(data, "buffers")),
        kept=tuple(
            UnchangedName(_read_field(entry, "name", str), _read_field(entry, "reason", str))
            for entry in _read_objects(data, "kept")
        ),
        sizes=MappingProxyType(sizes),
    )
    _check_buffers(layout)
    findings = tuple(_parse_finding(entry) for entry in _read_objects(data, "findings"))
    return Manifest(layout, findings, _read_field(data, "stamp", str, _NONE_TYPE))


def _check_buffers(layout: Layout) -> None:
    """What the digest leaves out of a buffer stands elsewhere in the manifest, too."""
    inputs, outputs = (
        {value.name: value.shape for value in reversed(side)}
        for side in (layout.inputs, layout.outputs)
    )
    for buffer in layout.buffers:
        if {buffer.input} - {None, *inputs} or {buffer.output} - {None, *outputs}:
            raise UnreadableTextError("a buffer has a name that no input or output has")
        sides = ((buffer.input, inputs), (buffer.output, outputs))
        shapes = [known[name] for name, known in sides if name is not None]
        if not shapes or buffer.shape != next((s for s in shapes if s is not None), None):
            raise UnreadableTextError("a buffer has a shape that its input and output do not have")
        if buffer.model not in layout.models:
            raise UnreadableTextError("a buffer is of a model that is not among its models")


def _parse_value(entry: Mapping[str, Any]) -> Value:
    return Value(
        _read_field(entry, "name", str),
        _read_field(entry, "dtype", str),
        _parse_shape(entry, "shape"),
    )


def _parse_buffer(entry: Mapping[str, Any]) -> Buffer:
    kind, shape = _read_choice(entry, "kind", get_args(BufferKind)), _parse_shape(entry, "shape")
    axis, window = (
        _read_field(entry, "sequence_axis", int, _NONE_TYPE),
        _read_field(entry, "window", str, _NONE_TYPE),
    )
    if (axis, window) != find_axis_and_window(kind, shape):
        raise UnreadableTextError(
            "a buffer has a sequence_axis or a window that is not its shape's"
        )
    return Buffer(
        layer=_read_field(entry, "layer", int),
        part=_read_field(entry, "part", str),
        kind=kind,
        buffer=_read_field(entry, "buffer", str),
        scope=_read_field(entry, "scope", str),
        input=_read_field(entry, "input", str, _NONE_TYPE),
        output=_read_field(entry, "output", str, _NONE_TYPE),
        dtype=_read_field(entry, "dtype", str),
        shape=shape,
        sequence_axis=axis,
        window=window,
        model=_read_field(entry, "model", str),
        token=_read_field(entry, "token", str, _NONE_TYPE),
    )


def _parse_finding(entry: Mapping[str, Any]) -> Finding:
    severity: Severity = _read_choice(entry, "severity", get_args(Severity))
    code, name, message, hint = (
        _read_field(entry, key, str) for key in ("code", "name", "message", "hint")
    )
    return Finding(code, severity, name, message, hint)


def _parse_shape(entry: Mapping[str, Any], key: str) -> Shape | None:
    dims = _read_field(entry, key, list, _NONE_TYPE)
    if dims is not None and not {type(dim) for dim in dims} <= {int, str, _NONE_TYPE}:
        raise UnreadableTextError(f"{key} has something else than sizes and symbols")
    return None if dims is None else tuple(dims)


def _read_objects(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    return _read_list(data, key, dict)


def _read_strings(data: Mapping[str, Any], key: str) -> list[str]:
    return _read_list(data, key, str)


def _read_list(data: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    found: list[Any] = _read_field(data, key, list)
    if any(type(item) is not kind for item in found):
        raise UnreadableTextError(f"something in its {key} is of another form")
    return found


def _read_choice(entry: Mapping[str, Any], key: str, known: Sequence[str]) -> Any:
    found = _read_field(entry, key, str)
    if found not in known:
        raise UnreadableTextError(f"{key} is none of {', '.join(known)}")
    return found


def _read_field(entry: Mapping[str, Any], key: str, *kinds: type) -> Any:
    """The value of a key, of just one of these types: a truth value is no number."""
    if key not in entry:
        raise UnreadableTextError(f"{shorten_name(key)} is missing")
    if type(entry[key]) not in kinds:
        raise UnreadableTextError(f"{shorten_name(key)} is of another form")
    return entry[key]
