"""YAML as a tree that knows where its scalars stand.

Read by ruamel.yaml's scanner and parser alone: values are not converted, tags are
not acted upon, and aliases are not put in place, so nothing can grow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from onnxkvrename.sidecars.text_edit import (
    MAX_DEPTH,
    Node,
    OpaqueNode,
    ScalarNode,
    TreeBuilder,
    UnreadableTextError,
    build_depth_error,
)

MAX_YAML_CHARS = 1 << 20
"""Characters that are read: ruamel.yaml takes 5 to 50 seconds for as many."""

_MAX_TAG_CHARS = 4096
_BRACKETS = re.compile(r"[\[\]{}]")


def parse_yaml_tree(text: str) -> Node | None:
    """The one document in a text, ``None`` if there is none.

    Raises :class:`Unreadable`, in one line, for what is no YAML, holds several
    documents, is nested too deeply, or has a key twice.
    """
    _check_parse_cost(text)
    growth = TreeBuilder()
    for event in _parse_events(text):
        _add_event(growth, event)
    if len(growth.roots) > 1:
        raise UnreadableTextError("holds more than one document")
    return growth.roots[0] if growth.roots else None


def _check_parse_cost(text: str) -> None:
    """Refuse what the scanner would take too long for: it is quadratic in tags and brackets."""
    if len(text) > MAX_YAML_CHARS:
        raise UnreadableTextError(f"has {len(text):,} characters, more than {MAX_YAML_CHARS:,}")
    if any(len(word) > _MAX_TAG_CHARS and "!" in word for word in text.split()):
        raise UnreadableTextError(f"has a tag of more than {_MAX_TAG_CHARS:,} characters")
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        depth = max(0, depth + (1 if bracket[0] in "[{" else -1))
        if depth > MAX_DEPTH:
            raise build_depth_error()


def _parse_events(text: str) -> Iterator[Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UnreadableTextError(f"is no YAML: {_format_problem(error.problem)}{where}") from None
    except Exception as error:  # its reader's and those of conversions have no common base
        raise UnreadableTextError(f"is no YAML: {_format_problem(error)}") from None


def _add_event(growth: TreeBuilder, event: Any) -> None:
    from ruamel.yaml import events

    if isinstance(event, (events.SequenceStartEvent, events.MappingStartEvent)):
        growth.open_collection(mapping=isinstance(event, events.MappingStartEvent))
    elif isinstance(event, (events.SequenceEndEvent, events.MappingEndEvent)):
        growth.close_collection()
    elif isinstance(event, events.AliasEvent):
        growth.add_node(OpaqueNode("an alias"))
    elif isinstance(event, events.ScalarEvent):
        growth.add_node(_build_scalar(event))


def _build_scalar(event: Any) -> ScalarNode:
    quote = event.style or ""
    bare = event.anchor is None and event.tag is None and quote in ("", "'", '"')
    start, end = event.start_mark.index, event.end_mark.index
    return ScalarNode(event.value, start, end, quote if bare else "", bare)


def _format_problem(problem: object) -> str:
    return " ".join(str(problem).split())[:200]
