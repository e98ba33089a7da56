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
    Growth,
    Node,
    Other,
    Scalar,
    Unreadable,
    too_deep,
)

LIMIT = 1 << 20
"""Characters that are read: ruamel.yaml takes 5 to 50 seconds for as many."""

_LONGEST_TAG = 4096
_BRACKETS = re.compile(r"[\[\]{}]")


def parse(text: str) -> Node | None:
    """The one document in a text, ``None`` if there is none.

    Raises :class:`Unreadable`, in one line, for what is no YAML, holds several
    documents, is nested too deeply, or has a key twice.
    """
    _judge(text)
    growth = Growth()
    for event in _events(text):
        _grow(growth, event)
    if len(growth.roots) > 1:
        raise Unreadable("holds more than one document")
    return growth.roots[0] if growth.roots else None


def _judge(text: str) -> None:
    """Refuse what the scanner would take too long for: it is quadratic in tags and brackets."""
    if len(text) > LIMIT:
        raise Unreadable(f"has {len(text):,} characters, more than {LIMIT:,}")
    if any(len(word) > _LONGEST_TAG and "!" in word for word in text.split()):
        raise Unreadable(f"has a tag of more than {_LONGEST_TAG:,} characters")
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        depth = max(0, depth + (1 if bracket[0] in "[{" else -1))
        if depth > MAX_DEPTH:
            raise too_deep()


def _events(text: str) -> Iterator[Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise Unreadable(f"is no YAML: {_line(error.problem)}{where}") from None
    except Exception as error:  # its reader's and those of conversions have no common base
        raise Unreadable(f"is no YAML: {_line(error)}") from None


def _grow(growth: Growth, event: Any) -> None:
    from ruamel.yaml import events

    if isinstance(event, (events.SequenceStartEvent, events.MappingStartEvent)):
        growth.open(mapping=isinstance(event, events.MappingStartEvent))
    elif isinstance(event, (events.SequenceEndEvent, events.MappingEndEvent)):
        growth.close()
    elif isinstance(event, events.AliasEvent):
        growth.add(Other("an alias"))
    elif isinstance(event, events.ScalarEvent):
        growth.add(_scalar(event))


def _scalar(event: Any) -> Scalar:
    quote = event.style or ""
    bare = event.anchor is None and event.tag is None and quote in ("", "'", '"')
    start, end = event.start_mark.index, event.end_mark.index
    return Scalar(event.value, start, end, quote if bare else "", bare)


def _line(problem: object) -> str:
    return " ".join(str(problem).split())[:200]
