"""``custom_io.yaml``: the precision in which a compiled model takes and gives its buffers.

After quic/efficient-transformers, ``base/modeling_qeff.py`` (``_compile``), which writes
the file, and the Cloud AI SDK's page on custom I/O, which says what the compiler reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import suggest_similar
from onnxkvrename.sidecars.text_edit import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    UnreadableTextError,
    describe_node,
    shorten_name,
)

CUSTOM_IO_FORM = "a list of entries with IOName and Precision, as QEfficient writes it"
PRECISIONS = ("float16", "mxint8", "float")
"""What a buffer can be kept in with nothing said beside it: QEfficient's two, and the SDK's."""

_PLAIN_SCALAR = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_YAML_KEYWORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def find_custom_io_names(tree: Node) -> Iterator[ScalarNode]:
    """The name in every entry. Raises :class:`Unreadable` for another form."""
    for name, _ in _find_entries(tree):
        yield name


def find_custom_io_dtypes(tree: Node) -> Iterator[tuple[str, str]]:
    """Each name with its dtype: the precision in capitals is ONNX's name, where it has one.

    Raises :class:`Unreadable` for another form, and for an entry without a precision.
    """
    for name, entry in _find_entries(tree):
        precision = entry.get("Precision")
        if not isinstance(precision, ScalarNode) or not precision.value:
            raise UnreadableTextError(
                f"has {shorten_name(name.value)} with {describe_node(precision)} for a Precision"
            )
        yield name.value, precision.value.upper()


def _find_entries(tree: Node) -> Iterator[tuple[ScalarNode, MappingNode]]:
    if not isinstance(tree, SequenceNode):
        raise UnreadableTextError(f"holds {describe_node(tree)}, where a list of entries belongs")
    for entry in tree.items:
        if not isinstance(entry, MappingNode):
            raise UnreadableTextError(f"has {describe_node(entry)} where an entry belongs")
        if entry.get("<<") is not None:
            raise UnreadableTextError("has an entry that is merged with another (<<)")
        name = entry.get("IOName")
        if not isinstance(name, ScalarNode) or not name.value:
            raise UnreadableTextError(f"has an entry with {describe_node(name)} for an IOName")
        yield name, entry


def render_custom_io(
    pairs: Iterable[tuple[str, str]], precision: str, others: Iterable[tuple[str, str]] = ()
) -> str:
    """A new file, just as QEfficient writes it.

    ``pairs`` are the names of each buffer's input and output, in the order of the
    plan. ``others`` are names that are no KV, each with its own precision. Raises
    :class:`KvRenameError` for an unknown precision, and :class:`ModelError` for a
    name that no YAML can hold.
    """
    entries = [(name, precision) for pair in pairs for name in pair]
    lines = (
        f" - IOName: {_format_name(name)}\n   Precision: {check_precision(kept_in)}\n\n"
        for name, kept_in in (*entries, *others)
    )
    return "".join(lines)


def check_precision(precision: str) -> str:
    """The precision itself, if the compiler has it; raises :class:`KvRenameError` if not."""
    if precision in PRECISIONS:
        return precision
    if precision == "int8":
        hint = "int8 needs a scale and an offset for each buffer; mxint8 keeps its own"
    else:
        similar = suggest_similar(precision.lower(), PRECISIONS)
        hint = similar or f"there are: {', '.join(PRECISIONS)}"
    raise KvRenameError(f"no precision is called {shorten_name(precision)}", hint=hint)


def _format_name(name: str) -> str:
    if _PLAIN_SCALAR.fullmatch(name) and name.lower() not in _YAML_KEYWORDS:
        return name
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise ModelError(
            f"has a name that is not UTF-8, and YAML can hold no other: {shorten_name(name)}",
            hint="rename that value first",
        )
    return f'"{"".join(map(_escape_char, name))}"'


def _escape_char(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else f"\\U{ord(char):08x}"
