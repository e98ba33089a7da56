"""Write the names of buffers with another token."""

from __future__ import annotations

from collections.abc import Mapping

from onnxkvrename.errors import RulesError
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.profile import NameMatch, Rules, fill_template

_EXAMPLE_TOKEN = "VLLM"


def rewrite_name(rules: Rules, match: NameMatch, token: str, *, normalize: bool = False) -> str:
    """Return a name with a different token; an empty one is none.

    With `normalize` its suffix becomes one that consumers match with an input.

    Raises:
        RulesError: The new name does not match as the same buffer, layer and token, so the
            rename could not be undone.
    """
    parts = dict(match.groups)
    if normalize and "suffix" in parts:
        parts["suffix"] = normalize_suffix(rules, match)
    name = _fill_name(match, parts, token)
    if not _reads_back(match, name, token):
        hints = []
        if _reads_back(match, _fill_name(match, parts, _EXAMPLE_TOKEN), _EXAMPLE_TOKEN):
            hints.append(f"choose another token, for example {_EXAMPLE_TOKEN}")
        if not rules.is_built_in:
            hints.append(f"correct {match.side}_name or {match.side} in the rules")
        raise RulesError(
            f"{match.side}_name writes {shorten_text(name)!r}, which cannot be parsed back by "
            f"`{match.side}` as {match.buffer}, layer {match.layer}, token {token or 'none'}",
            path=rules.name,
            hint=", or ".join(hints) or None,
        )
    return name


def _fill_name(match: NameMatch, parts: Mapping[str, str], token: str) -> str:
    template = match.rule.templates[match.side]
    return fill_template(template, {**parts, "token": token}, token)


def _reads_back(match: NameMatch, name: str, token: str) -> bool:
    """Return whether a name is that of the same buffer, with a token."""
    reread = match.rule.match(match.side, name)
    return reread is not None and (reread.pair_key, reread.token) == (match.pair_key, token)


def normalize_suffix(rules: Rules, match: NameMatch) -> str:
    """Return the suffix of an output, changed to one that consumers match with an input."""
    suffix = match.groups.get("suffix", "")
    return rules.normal_suffixes.get(suffix, suffix)
