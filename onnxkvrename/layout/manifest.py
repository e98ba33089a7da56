"""The manifest: a layout as a JSON document, which stands for the model elsewhere, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding, Severity, document_values, finding_values
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.kinds import Kind
from onnxkvrename.layout.layout import Buffer, Layout, context, digest
from onnxkvrename.model.signature import Value
from onnxkvrename.rules.plan import Kept
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.sidecars.text_edit import Unreadable, short

SCHEMA = "onnxkvrename.manifest/1"
_AGAIN = "onnxkvrename manifest MODEL -o FILE writes it again"
_NONE = type(None)
_WINDOWS = ("sliding_window", "sliding_window_mla", "chunked_local_attention")


class Manifest(NamedTuple):
    """What a manifest says: the layout, what was wrong with its models, the stamp they carry."""

    layout: Layout
    findings: tuple[Finding, ...]
    stamp: str | None


class Totals(NamedTuple):
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


def totals(layout: Layout) -> Totals:
    """What the buffers come to together."""
    growing: dict[str, list[int | None]] = {"context": [], "window": [], "encoder": []}
    for buffer in layout.buffers:
        if buffer.sequence is not None:
            growing[growth(buffer)].append(layout.token_bytes(buffer))
    states = [layout.state_bytes(b) for b in layout.buffers if b.kind == "mamba"]
    return Totals(
        **{name: _sum(sizes) for name, sizes in growing.items()},
        states=_sum(states),
        sequence=_sum(map(layout.sequence_bytes, layout.buffers)),
        batch=_sum(map(layout.batch_bytes, layout.buffers)),
    )


def growth(buffer: Buffer) -> str:
    """What a buffer grows with: the ``context``, a ``window`` of it, the ``encoder``; or not."""
    if buffer.sequence is None:
        return ""
    if buffer.kind == "cross_attention":
        return "encoder"
    return "window" if buffer.window is not None or buffer.kind in _WINDOWS else "context"


def _sum(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def layout_digest(layout: Layout) -> str | None:
    """The digest of a layout; ``None`` for one without buffers, which is like no other."""
    return digest(layout) if layout.buffers else None


def as_json(
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
        "kv_layout_sha256": layout_digest(layout),
        "stamp": stamp,
        "layers": list(layout.layers),
        "sizes": dict(layout.sizes),
        "missing": list(layout.missing),
        "inputs": [_value(value) for value in layout.inputs],
        "outputs": [_value(value) for value in layout.outputs],
        "buffers": [_buffer(layout, buffer) for buffer in layout.buffers],
        "kept": [kept._asdict() for kept in layout.kept],
        "totals": _totals(layout),
        "findings": [
            {"model": report.path, **finding_values(found)}
            for report in reports
            for found in report.findings
        ],
        "vllm": vllm,
    }
    values = document_values(SCHEMA, "manifest", code, fault, **content)
    return json.dumps({**values, "sha256": seal(values)}, indent=2)


def seal(values: Mapping[str, Any]) -> str:
    """The digest of a whole document, by which a later change of anything in it is seen.

    SHA-256, in hexadecimal, over the document without its ``sha256`` as JSON with the keys
    of each object sorted, without blanks and in ASCII.
    """
    rest = {key: value for key, value in values.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode("ascii")).hexdigest()


def _value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": _listed(value.shape)}


def _buffer(layout: Layout, buffer: Buffer) -> dict[str, Any]:
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
        "shape": _listed(shape),
        "sized_shape": None if shape is None else _listed(layout.sized(shape)),
        "sequence_axis": buffer.sequence,
        "window": window,
        "window_size": size,
        "bytes_per_token": layout.token_bytes(buffer),
        "bytes_per_state": layout.state_bytes(buffer),
        "bytes": layout.sequence_bytes(buffer),
        "model": buffer.model,
    }


def _listed(shape: Shape | None) -> list[Any] | None:
    return None if shape is None else list(shape)


def _totals(layout: Layout) -> dict[str, Any]:
    found = totals(layout)
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


def read(text: str, path: str) -> Manifest:
    """What the text of a manifest says; ``path`` is what messages call it.

    Raises :class:`ModelError` for what is no manifest, for one of another schema, for one
    that was changed after it was written, for one that contradicts itself, and for one whose
    layout's digest is not that of its buffers.
    """
    try:
        data = json.loads(text)
        sealed = isinstance(data, dict) and data.get("sha256") == seal(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"is not JSON: {error}", path=path) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        said = f"is {short(schema)}" if isinstance(schema, str) else "says no schema"
        raise ModelError(f"is no manifest: it {said}, not {SCHEMA}", path=path, hint=_AGAIN)
    if data.get("error") is not None:
        raise ModelError("is the answer of a manifest that failed", path=path, hint=_AGAIN)
    if not sealed:
        raise ModelError(
            "was changed after it was written: its sha256 is not that of what it says",
            path=path,
            hint=f"{_AGAIN}; sizes are given with --dim",
        )
    try:
        found = _read(data)
    except Unreadable as error:
        raise ModelError(f"is no whole manifest: {error}", path=path, hint=_AGAIN) from None
    if data.get("kv_layout_sha256") != layout_digest(found.layout):
        raise ModelError(
            "has a kv_layout_sha256 that is not that of its buffers", path=path, hint=_AGAIN
        )
    return found


def _read(data: Mapping[str, Any]) -> Manifest:
    sizes = _of(data, "sizes", dict)
    if any(_of(sizes, symbol, int) < 1 for symbol in sizes):
        raise Unreadable("a size is less than 1")
    layout = Layout(
        models=tuple(_texts(data, "models")),
        inputs=tuple(_read_value(entry) for entry in _entries(data, "inputs")),
        outputs=tuple(_read_value(entry) for entry in _entries(data, "outputs")),
        buffers=tuple(_read_buffer(entry) for entry in _entries(data, "buffers")),
        kept=tuple(
            Kept(_of(entry, "name", str), _of(entry, "reason", str))
            for entry in _entries(data, "kept")
        ),
        sizes=MappingProxyType(sizes),
    )
    _check_buffers(layout)
    findings = tuple(_read_finding(entry) for entry in _entries(data, "findings"))
    return Manifest(layout, findings, _of(data, "stamp", str, _NONE))


def _check_buffers(layout: Layout) -> None:
    """What the digest leaves out of a buffer stands elsewhere in the manifest, too."""
    inputs, outputs = (
        {value.name: value.shape for value in reversed(side)}
        for side in (layout.inputs, layout.outputs)
    )
    for buffer in layout.buffers:
        if {buffer.input} - {None, *inputs} or {buffer.output} - {None, *outputs}:
            raise Unreadable("a buffer has a name that no input or output has")
        sides = ((buffer.input, inputs), (buffer.output, outputs))
        shapes = [known[name] for name, known in sides if name is not None]
        if not shapes or buffer.shape != next((s for s in shapes if s is not None), None):
            raise Unreadable("a buffer has a shape that its input and output do not have")
        if buffer.model not in layout.models:
            raise Unreadable("a buffer is of a model that is not among its models")


def _read_value(entry: Mapping[str, Any]) -> Value:
    return Value(_of(entry, "name", str), _of(entry, "dtype", str), _shape(entry, "shape"))


def _read_buffer(entry: Mapping[str, Any]) -> Buffer:
    kind, shape = _one_of(entry, "kind", get_args(Kind)), _shape(entry, "shape")
    axis, window = _of(entry, "sequence_axis", int, _NONE), _of(entry, "window", str, _NONE)
    if (axis, window) != context(kind, shape):
        raise Unreadable("a buffer has a sequence_axis or a window that is not its shape's")
    return Buffer(
        layer=_of(entry, "layer", int),
        part=_of(entry, "part", str),
        kind=kind,
        buffer=_of(entry, "buffer", str),
        scope=_of(entry, "scope", str),
        input=_of(entry, "input", str, _NONE),
        output=_of(entry, "output", str, _NONE),
        dtype=_of(entry, "dtype", str),
        shape=shape,
        sequence=axis,
        window=window,
        model=_of(entry, "model", str),
        token=_of(entry, "token", str, _NONE),
    )


def _read_finding(entry: Mapping[str, Any]) -> Finding:
    severity: Severity = _one_of(entry, "severity", get_args(Severity))
    code, name, message, hint = (
        _of(entry, key, str) for key in ("code", "name", "message", "hint")
    )
    return Finding(code, severity, name, message, hint)


def _shape(entry: Mapping[str, Any], key: str) -> Shape | None:
    dims = _of(entry, key, list, _NONE)
    if dims is not None and not {type(dim) for dim in dims} <= {int, str, _NONE}:
        raise Unreadable(f"{key} has something else than sizes and symbols")
    return None if dims is None else tuple(dims)


def _entries(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    return _all(data, key, dict)


def _texts(data: Mapping[str, Any], key: str) -> list[str]:
    return _all(data, key, str)


def _all(data: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    found: list[Any] = _of(data, key, list)
    if any(type(item) is not kind for item in found):
        raise Unreadable(f"something in its {key} is of another form")
    return found


def _one_of(entry: Mapping[str, Any], key: str, known: Sequence[str]) -> Any:
    found = _of(entry, key, str)
    if found not in known:
        raise Unreadable(f"{key} is none of {', '.join(known)}")
    return found


def _of(entry: Mapping[str, Any], key: str, *kinds: type) -> Any:
    """The value of a key, of just one of these types: a truth value is no number."""
    if key not in entry:
        raise Unreadable(f"{short(key)} is missing")
    if type(entry[key]) not in kinds:
        raise Unreadable(f"{short(key)} is of another form")
    return entry[key]
