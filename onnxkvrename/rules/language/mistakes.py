"""Explain mistakes in rules: what a key should be, with an example."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onnxkvrename.documents import ObjectReader, UnreadableTextError
from onnxkvrename.findings import find_similar

_PAGE = "docs/rules.md explains each key"
_KV_KEY = re.compile(r"kv\[[0-9]+\]\.([a-z_]+)(?:\.[^.:]+)?: ")
_KV_EXAMPLES = {
    "input": r"input = 'past\.(?P<layer>[0-9]+)\.(?P<buffer>key|value)"
    r"(?:_(?P<token>[A-Za-z0-9]+))?'",
    "output": r"output = 'present\.(?P<layer>[0-9]+)\.(?P<buffer>key|value)"
    r"(?:_(?P<token>[A-Za-z0-9]+))?'",
    "input_name": 'input_name = "past.{layer}.{buffer}[_{token}]"',
    "output_name": 'output_name = "present.{layer}.{buffer}[_{token}]"',
    "kinds": 'kinds = { attention = ["key", "value"] }',
    "update": 'update = { attention = "append" }',
    "defaults": 'defaults = { suffix = "_RetainedState" }',
}
"""A line for each key of [[kv]] that has a form of its own."""
_GROUPS = {
    "token": ("token", "(?:_(?P<token>[A-Za-z0-9]+))?"),
    "layer": ("number of the layer", "(?P<layer>[0-9]+)"),
    "buffer": ("part of the layer", "(?P<buffer>key|value)"),
    "first": ("first layer", "(?P<first>[0-9]+)"),
    "end": ("layer after the last", "(?P<end>[0-9]+)"),
}
"""For each group that a pattern needs, what it matches, and how it is mostly written."""


def choose_hint(error: ValueError) -> str:
    """Return how to fix a mistake: the error's own hint, an example of the key, or the page."""
    hint = getattr(error, "hint", None)
    if hint:
        return str(hint)
    message = str(error)
    if message.startswith("not TOML"):
        return f"write patterns in single quotes and templates in double quotes; {_PAGE}"
    key = _KV_KEY.match(message)
    example = _KV_EXAMPLES.get(key[1]) if key else None
    return f"as in {example}; {_PAGE}" if example else _PAGE


def reject_misspelled_key(table: ObjectReader, known_keys: Sequence[str]) -> None:
    """Raise for a key that is not known, but similar to a known one that is not there.

    Without this, a required key would be reported as missing and its misspelling not at all.

    Raises:
        UnreadableTextError: There is such a key.
    """
    missing = [key for key in known_keys if key not in table.values]
    for key in table.values:
        similar = None if key in known_keys else find_similar(key, missing, cutoff=0.8)
        if similar is not None:
            raise table.build_error(key, f"is not a known key; did you mean {similar}?")


def build_group_error(table: ObjectReader, key: str, group: str) -> UnreadableTextError:
    """Return the error for a pattern without a group that it needs."""
    contents, example = _GROUPS[group]
    error = table.build_error(key, f"has no group (?P<{group}>…)")
    error.hint = f"add {example} where names have the {contents}; {_PAGE}"
    return error


def build_token_error(table: ObjectReader, key: str) -> UnreadableTextError:
    """Return the error for a template that does not say where a token goes."""
    error = table.build_error(key, "must contain {token} once, inside [...]")
    error.hint = f"what is in [...] is written only with a token: {_KV_EXAMPLES[key]}; {_PAGE}"
    return error
