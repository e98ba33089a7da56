"""Convert a layout to a manifest, a JSON document that replaces the model, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    compute_byte_totals,
    compute_layout_digest,
)
from onnxkvrename.limits import shorten_text
from onnxkvrename.model.signature import Dim, Value
from onnxkvrename.records import (
    Document,
    Spread,
    compute_document_digest,
    fill_record,
    read_record,
)
from onnxkvrename.rules.plan import UnchangedName
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.rules.results import ModelReport

_REWRITE_HINT = "write it again from its model, with the command manifest"


class ManifestBuffer(NamedTuple):
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


class ManifestContent(NamedTuple):
    """The KV buffers of a model.

    Attributes:
        profile: The rules that identify KV names; `None` if the job could not be done.
        models: The models that make up the layout, in the order of their layers.
        kv_layout_sha256: SHA-256 over the JSON list of [layer, part, kind, dtype, shape, name] of
            each buffer in order, without blanks and in ASCII: name is the input's, the batch in a
            shape is `None`, a symbol whose size is known is that size. `None` without buffers.
        layers: The numbers of the layers with buffers.
        sizes: The sizes of the symbols in the shapes of buffers.
        compiled_dtypes: Whether the dtypes of all buffers are those of a compile, from its
            custom_io.yaml; otherwise they are the graph's.
        missing: Symbols in the shapes of buffers whose sizes are not known, the batch's aside.
        inputs: All inputs of the graph.
        outputs: All outputs of the graph.
        buffers: The buffers, by layer, then by part.
        kept: Inputs and outputs of the model whose names stay, each with the reason.
        totals: The bytes of all buffers.
        findings: What is wrong with the models.
        vllm: With --block-size, what vLLM makes of it: a projection.
    """

    profile: ProfileChoice | None
    models: tuple[str, ...]
    kv_layout_sha256: str | None
    layers: tuple[int, ...]
    sizes: Mapping[str, int]
    compiled_dtypes: bool
    missing: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    buffers: tuple[ManifestBuffer, ...]
    kept: tuple[UnchangedName, ...]
    totals: ByteTotals
    findings: tuple[ModelFinding, ...]
    vllm: Mapping[str, Any] | None


def compute_kv_layout_sha256(layout: Layout) -> str | None:
    """Return the digest of a layout, ``None`` without buffers: it is then equal to no other."""
    return compute_layout_digest(layout) if layout.buffers else None


def describe_layout(
    layout: Layout,
    reports: Sequence[ModelReport] = (),
    *,
    vllm: Mapping[str, Any] | None = None,
    profile: ProfileChoice | None = None,
) -> ManifestContent:
    """Return the content of a manifest.

    Args:
        layout: The layout of the models.
        reports: The reports of the models, with their findings.
        vllm: A projection, as JSON.
        profile: The profile that recognized KV names.
    """
    return fill_record(
        ManifestContent,
        layout,
        profile=profile,
        kv_layout_sha256=compute_kv_layout_sha256(layout),
        compiled_dtypes=layout.has_compiled_dtypes,
        missing=layout.unresolved_symbols,
        buffers=tuple(_describe_buffer(layout, buffer) for buffer in layout.buffers),
        totals=compute_byte_totals(layout),
        findings=tuple(
            ModelFinding(report.path, finding) for report in reports for finding in report.findings
        ),
        vllm=vllm,
    )


DOCUMENT = Document(
    "onnxkvrename.manifest/1",
    "manifest",
    describe_layout(Layout((), (), (), (), ())),
    is_sealed=True,
)


def _describe_buffer(layout: Layout, buffer: KvBuffer) -> ManifestBuffer:
    shape, window = buffer.shape, buffer.window
    return ManifestBuffer(
        buffer,
        sized_shape=None if shape is None else layout.resolve_shape(shape),
        window_size=layout.sizes.get(window) if isinstance(window, str) else window,
        bytes_per_token=layout.compute_token_bytes(buffer),
        bytes_per_state=layout.compute_state_bytes(buffer),
        bytes=layout.compute_sequence_bytes(buffer),
    )


def parse_manifest(text: str, path: str) -> tuple[Layout, tuple[Finding, ...]]:
    """Return the layout of a manifest, and what was wrong with its models.

    Args:
        text: The text of the file.
        path: The path of the file, for messages.

    Raises:
        ModelError: The text is not strict JSON or not a manifest, has another schema, was
            changed after it was written, or has a digest that is not that of its buffers.
    """
    data = _parse_sealed_document(text, path)
    try:
        content = read_record(ManifestContent, data)
    except UnreadableTextError as error:
        raise ModelError(f"is not valid: {error}", path=path, hint=_REWRITE_HINT) from None
    layout = _build_layout(content)
    if content.kv_layout_sha256 != compute_kv_layout_sha256(layout):
        raise ModelError(
            "has a kv_layout_sha256 that does not match its buffers", path=path, hint=_REWRITE_HINT
        )
    return layout, tuple(each.finding for each in content.findings)


def _parse_sealed_document(text: str, path: str) -> dict[str, Any]:
    """Return the object of a document with this schema whose digest is right."""
    try:
        data = parse_json(text)
    except UnreadableTextError as error:
        raise ModelError(str(error), path=path) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(data, dict) or schema != DOCUMENT.schema:
        claim = f"is {shorten_text(schema)}" if isinstance(schema, str) else "has no schema"
        raise ModelError(
            f"is not a manifest: it {claim}, not {DOCUMENT.schema}", path=path, hint=_REWRITE_HINT
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


def _build_layout(content: ManifestContent) -> Layout:
    return fill_record(
        Layout,
        content,
        buffers=tuple(each.buffer for each in content.buffers),
        sizes=MappingProxyType(content.sizes),
        other_stages=(),
        has_compiled_dtypes=content.compiled_dtypes,
    )
