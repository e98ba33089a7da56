"""The digest of a layout, and the stamp in a model's metadata that must be equal to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.layout.layout import KvBuffer, Layout, build_layout
from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.kv_model import KvModel

_STAMP_HINT = (
    "the graph changed, or it was stamped with another set: put the stamped file back, or, if "
    "that is meant, stamp it again with `manifest --stamp`"
)


def compute_layout_digest(layout: Layout) -> str:
    """Return a digest that is equal for workers whose buffers are alike.

    Returns:
        SHA-256, in hexadecimal, of the JSON list of ``[layer, part, kind, dtype, shape,
        name]`` of each buffer in order, without blanks and in ASCII. The name is the
        input's. The batch is ``null``, since one sequence is transferred at a time; a
        symbol whose size is known is that size. A ``--kv-cache-dtype`` comes last, if one is
        given.
    """
    rows: list[object] = [
        [b.layer, b.part, b.kind, b.dtype, _normalize_shape(layout, b), b.input or b.output]
        for b in layout.buffers
    ]
    if layout.kv_cache_dtype is not None:
        rows.append(layout.kv_cache_dtype)
    return sha256(json.dumps(rows, separators=(",", ":")).encode("ascii")).hexdigest()


def find_stamp_mismatches(layout: Layout, stamps: Mapping[str, str | None]) -> dict[str, Finding]:
    """Return KV621 for every model whose stamp is not the digest of the layout.

    Args:
        layout: The layout of the models together.
        stamps: The models' paths to their stamps, ``None`` for a model without one. If no
            model has a stamp, none is missing.

    Returns:
        The models' paths to their findings.
    """
    if set(stamps.values()) <= {None}:
        return {}
    digest = compute_layout_digest(layout)
    return {
        path: _build_stamp_finding(stamp, digest)
        for path, stamp in stamps.items()
        if stamp != digest
    }


def check_stamp(source: KvModel, stamp: str | None) -> Finding | None:
    """Return KV621 for a model with a stamp that is not the digest of its own layout.

    Args:
        source: A complete model, not a window.
        stamp: Its stamp, ``None`` for a model without one.
    """
    if stamp is None:
        return None
    try:
        layout = build_layout([source])
    except ModelError as error:
        return build_finding(
            "KV621", "", f"has a stamp, but no layout: it {error.message}", _STAMP_HINT
        )
    return find_stamp_mismatches(layout, {source.path: stamp}).get(source.path)


def _build_stamp_finding(stamp: str | None, digest: str) -> Finding:
    if stamp is None:
        hint = "stamp all of them together, with `manifest --stamp`"
        return build_finding(
            "KV621", "", "has no stamp, but other windows of this model have one", hint
        )
    return build_finding(
        "KV621",
        "",
        f"has the stamp {stamp[:12]}…, but the layout of its graph is {digest[:12]}…",
        _STAMP_HINT,
    )


def _normalize_shape(layout: Layout, buffer: KvBuffer) -> list[Dim] | None:
    shape = buffer.sequence_shape
    return None if shape is None else [None, *layout.resolve_shape(shape)]
