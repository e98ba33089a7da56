"""``custom_io.yaml``: the precision of each input and output of a compiled model.

QEfficient writes the file, the Cloud AI compiler reads it:
https://github.com/quic/efficient-transformers/blob/main/QEfficient/base/modeling_qeff.py
(``_compile``), and the Cloud AI SDK's page on custom I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import suggest_similar
from onnxkvrename.limits import shorten_text
from onnxkvrename.sidecars.tree import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    describe_node,
    expect,
    parse_yaml_tree,
)

PRECISIONS = ("float16", "mxint8", "float")
"""Precisions that need no further parameters: QEfficient's two, and the SDK's."""

CAPTION = "custom I/O"
EXPECTED_FORM = "a list of entries with IOName and Precision, as QEfficient writes it"
_PLAIN_SCALAR = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_YAML_KEYWORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def find_custom_io_names(tree: Node) -> Iterator[ScalarNode]:
    """Yield the name in every entry.

    Raises:
        UnreadableTextError: The tree has another form.
    """
    for name, _ in _find_entries(tree):
        yield name


def parse_custom_io_dtypes(text: str, path: str) -> Mapping[str, str]:
    """Return the dtype of each name in the text of a file; messages name the path.

    Precisions are in capitals, which are ONNX's dtypes where ONNX has them.

    Raises:
        ModelError: The text is not YAML, or does not have the expected form.
    """
    try:
        tree = parse_yaml_tree(text)
        return dict(find_custom_io_dtypes(tree)) if tree is not None else {}
    except UnreadableTextError as error:
        raise ModelError(
            f"cannot be read as {CAPTION}: it {error}",
            path=path,
            hint=error.hint or f"expected: {EXPECTED_FORM}",
        ) from None


def find_custom_io_dtypes(tree: Node) -> Iterator[tuple[str, str]]:
    """Yield each name with its dtype, the precision in capitals.

    Raises:
        UnreadableTextError: The tree has another form, or an entry has no precision.
    """
    for name, entry in _find_entries(tree):
        precision = entry.get("Precision")
        if not isinstance(precision, ScalarNode) or not precision.value:
            raise UnreadableTextError(
                f"has {shorten_text(name.value)} with {describe_node(precision)} as a Precision"
            )
        yield name.value, precision.value.upper()


def _find_entries(tree: Node) -> Iterator[tuple[ScalarNode, MappingNode]]:
    for item in expect(SequenceNode, tree, "its content").items:
        entry = expect(MappingNode, item, "an entry")
        if entry.get("<<") is not None:
            raise UnreadableTextError("has an entry that is merged with another (<<)")
        name = expect(ScalarNode, entry.get("IOName"), "an IOName")
        if not name.value:
            raise UnreadableTextError("has an empty string as an IOName")
        yield name, entry


def render_custom_io(
    pairs: Iterable[tuple[str, str]],
    precision: str,
    other_precisions: Iterable[tuple[str, str]] = (),
) -> str:
    """Return the text of a new file, exactly as QEfficient writes it.

    The pairs are the names of each buffer's input and output, in the order of the plan, all of one
    precision; other values have their own.

    Raises:
        KvRenameError: A precision is not one of `PRECISIONS`.
        ModelError: A name cannot be written in YAML.
    """
    precisions = [(name, precision) for pair in pairs for name in pair]
    entries = (
        f" - IOName: {_format_name(name)}\n   Precision: {check_precision(value)}\n\n"
        for name, value in (*precisions, *other_precisions)
    )
    return "".join(entries)


def check_precision(precision: str) -> str:
    """Return the precision itself.

    Raises:
        KvRenameError: The compiler does not have this precision.
    """
    if precision in PRECISIONS:
        return precision
    if precision == "int8":
        hint = "int8 needs a scale and an offset for each buffer; mxint8 keeps its own"
    else:
        similar = suggest_similar(precision, PRECISIONS)
        hint = similar or f"there are: {', '.join(PRECISIONS)}"
    raise KvRenameError(f"unknown precision {shorten_text(precision)}", hint=hint)


def _format_name(name: str) -> str:
    if _PLAIN_SCALAR.fullmatch(name) and name.lower() not in _YAML_KEYWORDS:
        return name
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise ModelError(
            f"has a name that is not UTF-8, and YAML cannot hold any other: {shorten_text(name)}",
            hint="rename that value first",
        )
    return f'"{"".join(map(_escape_char, name))}"'


def _escape_char(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else f"\\U{ord(char):08x}"
