"""Names by template: one text with ``%d`` matches the names of all layers."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile

PLACEHOLDER = "%d"
"""Where a template has the number of a layer, as printf writes it."""

_MAX_TEMPLATE_CHARS = 512
_PRINTED = re.compile(r"%[-+ #0]*[0-9]*(?:hh?|ll?|z)?[dius]|\{[A-Za-z_]*\}")
_MAX_PRINTED = 2
"""Places in a text that a program prints into; the time to match it grows with their power."""
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


def is_template(text: str) -> bool:
    """Return whether a text has one ``%d``, and nothing else that printf would replace."""
    return text.count("%") == 1 and PLACEHOLDER in text and len(text) <= _MAX_TEMPLATE_CHARS


def fill_template(template: str, number: int | str) -> str:
    """Return the name that a template has for the layer with a number."""
    return template.replace(PLACEHOLDER, str(number))


def find_generated_names(template: str, names: Iterable[str]) -> dict[str, str]:
    """Return the names that a template generates, each by the number of its layer."""
    head, _, tail = template.partition(PLACEHOLDER)
    return {
        number: name
        for name in names
        if name.startswith(head)
        and name.endswith(tail)
        and _NUMBER.fullmatch(number := name[len(head) : len(name) - len(tail)])
    }


def find_printed_names(text: str, sorted_names: Sequence[str]) -> frozenset[str]:
    """Return the names that a text makes if a program prints numbers or words into it.

    Args:
        text: Any text; one without a place for a number makes nothing.
        sorted_names: The names, in order.
    """
    places = list(_PRINTED.finditer(text[: _MAX_TEMPLATE_CHARS + 1]))
    is_short = len(text) <= _MAX_TEMPLATE_CHARS
    if not is_short or not 1 <= len(places) <= _MAX_PRINTED or places[0].start() == 0:
        return frozenset()
    head = text[: places[0].start()]
    first = bisect_left(sorted_names, head)
    pattern, end = "", 0
    for place in places:
        printed = "[A-Za-z_]+" if place[0].endswith("s") else "[0-9]+"
        pattern += re.escape(text[end : place.start()]) + printed
        end = place.end()
    name_pattern = re.compile(pattern + re.escape(text[end:]))
    similar = takewhile(lambda name: name.startswith(head), islice(sorted_names, first, None))
    return frozenset(name for name in similar if name_pattern.fullmatch(name))


def derive_template(template: str, new_names: Mapping[str, str]) -> str | None:
    """Return the template that generates new names; ``None`` if there is none.

    Args:
        template: The template of the old names.
        new_names: The new name of each layer, by the number of the layer; at least one.
    """
    number, name = next(iter(new_names.items()))
    candidates = []
    if "%" not in name and len(name) <= 2 * _MAX_TEMPLATE_CHARS:
        starts = (match.start() for match in re.finditer(f"(?={number})", name))
        candidates = [f"{name[:at]}{PLACEHOLDER}{name[at + len(number) :]}" for at in starts]
    fitting = [
        candidate
        for candidate in candidates
        if all(fill_template(candidate, layer) == new for layer, new in new_names.items())
    ]
    head = template.partition(PLACEHOLDER)[0]
    # A token may have the layer's number as well: take the one at the same place.
    return max(
        fitting, key=lambda candidate: candidate.startswith(head + PLACEHOLDER), default=None
    )


def abstract_number(name: str) -> str:
    """Return the template that a name most likely comes from: its first number is the layer."""
    return re.sub("[0-9]+", PLACEHOLDER, name, count=1)
