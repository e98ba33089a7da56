"""Formats that are mistaken for ONNX models. Loaded only when a file could not be read as one."""

from __future__ import annotations

import re

_FORMATS_BY_MAGIC = (
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself: git lfs pull"),
    (b"<", "an HTML or XML page", "the download went wrong"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"GGUF", "a GGUF file", "export the model to ONNX first"),
    (b"\x80\x02", "a pickle", "export the model to ONNX first"),
    (b"\x80\x03", "a pickle", "export the model to ONNX first"),
    (b"\x80\x04", "a pickle", "export the model to ONNX first"),
)


_MANIFEST_TEXT = re.compile(rb"kind[ \x1b\[0-9;m]+parts[ \x1b\[0-9;m]+layers\b", re.IGNORECASE)
"""The headings of ``onnxkvrename manifest --format text``, in a pipe or with colors."""


def detect_other_format(head: bytes) -> tuple[str, str] | None:
    """Return what a file is that is not an ONNX model, and how to get one.

    Args:
        head: The first 4 KiB of the file.

    Returns:
        The name of the format with its article, and a hint; `None` if it is not known.
    """
    stripped = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if stripped.startswith(b"<") and b"ir_version" in stripped[:80]:
        return "ONNX text", "onnx.parser converts it to a model"
    for magic, name, hint in _FORMATS_BY_MAGIC:
        if stripped.startswith(magic):
            return name, hint
    if _MANIFEST_TEXT.search(head):
        hint = "onnxkvrename manifest MODEL -o FILE writes the JSON"
        return "a manifest printed as text: not a manifest in JSON", hint
    if head[4:8] == b"ORTM":
        return "an ONNX Runtime model (.ort)", "use the .onnx file it was made from"
    if head[8:9] == b"{" and len(head) > 9 and int.from_bytes(head[:8], "little") < 1 << 27:
        return "a safetensors file", "export the model to ONNX first"
    if not head.strip(b"\0"):
        return "nothing but zeros", "the copy or download went wrong"
    if stripped.startswith(b"{") and b"onnxkvrename.manifest/" in head:
        return "a manifest", "compare, check-consumer and manifest accept it instead of its model"
    if _is_text(head):
        return "a text file", "pass a binary .onnx file"
    return None


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return False
        text = head[: error.start].decode("utf-8")
    return all(char.isprintable() or char in "\t\r\n\f" for char in text)
