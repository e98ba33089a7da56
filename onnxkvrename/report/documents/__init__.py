"""The JSON documents of all commands: records whose docstrings say what each member means."""

from __future__ import annotations

from importlib import import_module

from onnxkvrename.records import Document

MODULES = {
    "rename": "onnxkvrename.report.documents.rename_json",
    "verify": "onnxkvrename.report.documents.verify_json",
    "inspect": "onnxkvrename.report.documents.inspect_json",
    "compare": "onnxkvrename.report.documents.compare_json",
    "pairs": "onnxkvrename.report.documents.pairs_json",
}
"""The module of each command's document."""


def load_document(command: str) -> Document:
    """Return the document of a command."""
    document: Document = import_module(MODULES[command]).DOCUMENT
    return document
