"""Parse YAML into a tree whose scalars know their positions in the text.

Only the scanner and the parser of ruamel.yaml are used: values are not converted, tags are
ignored, and aliases are not expanded, so a small text cannot become a large tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from onnxkvrename.documents import UnreadableTextError, build_depth_error
from onnxkvrename.limits import MAX_DEPTH
from onnxkvrename.sidecars.tree import Node, OpaqueNode, ScalarNode, TreeBuilder

MAX_YAML_CHARS = 1 << 18
"""The longest text that is parsed, in characters; ruamel.yaml takes 1 to 10 seconds for it."""

_MAX_TAG_CHARS = 4096


def parse_yaml_tree(text: str) -> Node | None:
    """Return the tree of the only document in a YAML text, ``None`` if there is none.

    Raises:
        UnreadableTextError: The text is too long, is not YAML, holds several documents, is
            nested too deeply, or has a key twice. The message has one line.
    """
    from ruamel.yaml import events  # slow to import, and JSON sidecars do not need it

    _check_parse_cost(text)
    builder = TreeBuilder()
    found = list(_limit_depth(_parse_events(text)))
    aliases = {event.anchor for event in found if isinstance(event, events.AliasEvent)}
    depth = shared_from = 0  # levels of open lists and mappings; the first one with an alias
    for event in found:
        if isinstance(event, events.CollectionStartEvent):
            depth += 1
            if not shared_from and event.anchor in aliases:
                shared_from = depth
        elif isinstance(event, events.CollectionEndEvent):
            depth -= 1
            shared_from = shared_from if depth >= shared_from else 0
        _add_event(builder, event, is_shared=shared_from > 0)
    if len(builder.roots) > 1:
        raise UnreadableTextError("contains more than one document")
    return builder.roots[0] if builder.roots else None


def _check_parse_cost(text: str) -> None:
    """Raise for text that would take too long: the scanner is quadratic in tags."""
    if len(text) > MAX_YAML_CHARS:
        raise UnreadableTextError(f"has {len(text):,} characters, more than {MAX_YAML_CHARS:,}")
    if any(len(word) > _MAX_TAG_CHARS and "!" in word for word in text.split()):
        raise UnreadableTextError(f"has a tag of more than {_MAX_TAG_CHARS:,} characters")


def _parse_events(text: str) -> Iterator[Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UnreadableTextError(f"is not YAML: {_format_problem(error.problem)}{where}") from None
    except Exception as error:  # its reader and its conversions have no common base class
        raise UnreadableTextError(f"is not YAML: {_format_problem(error)}") from None


def _limit_depth(found: Iterable[Any]) -> Iterator[Any]:
    """Pass events on up to the first that is too deep: a short text can have very many."""
    from ruamel.yaml import events

    depth = 0
    for event in found:
        depth += isinstance(event, events.CollectionStartEvent)
        depth -= isinstance(event, events.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise build_depth_error()
        yield event


def _add_event(builder: TreeBuilder, event: Any, *, is_shared: bool) -> None:
    from ruamel.yaml import events

    if isinstance(event, (events.SequenceStartEvent, events.MappingStartEvent)):
        builder.open_collection(mapping=isinstance(event, events.MappingStartEvent))
    elif isinstance(event, (events.SequenceEndEvent, events.MappingEndEvent)):
        builder.close_collection()
    elif isinstance(event, events.AliasEvent):
        builder.add_node(OpaqueNode("an alias"))
    elif isinstance(event, events.ScalarEvent):
        builder.add_node(_build_scalar(event, is_shared=is_shared))


def _build_scalar(event: Any, *, is_shared: bool) -> ScalarNode:
    quote = event.style or ""
    is_simple = event.anchor is None and event.tag is None and quote in ("", "'", '"')
    start, end = event.start_mark.index, event.end_mark.index
    return ScalarNode(event.value, start, end, quote if is_simple else "", is_simple, is_shared)


def _format_problem(problem: object) -> str:
    return " ".join(str(problem).split())[:200]
