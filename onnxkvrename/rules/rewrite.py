"""Write the names of buffers: with another token, or as another profile calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from onnxkvrename.errors import RulesError
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.kinds import get_family
from onnxkvrename.rules.patterns import NameTable
from onnxkvrename.rules.profile import KindRule, KvRule, NameMatch, Rules, fill_template

_EXAMPLE_TOKEN = "VLLM"


def rewrite_name(rules: Rules, match: NameMatch, token: str, *, normalize: bool = False) -> str:
    """Return a name with a different token; an empty one is none.

    With `normalize` its suffix becomes one that consumers match with an input.

    Raises:
        RulesError: The new name does not match as the same buffer, layer and token, so the
            rename could not be undone.
    """
    if rules.target is not None:
        return convert_name(match, token, rules, rules.target)
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


def describe_part(kind: str, buffer: str, role: str) -> str:
    """Describe a buffer in words that all profiles share.

    The kind is the one that decides what vLLM calls it; the role is empty if its profile says none.
    """
    return f"{get_family(kind)} {role or buffer.removeprefix('past_')}"


class PartOfKind(NamedTuple):
    """A part of a kind in some rules."""

    rule: KvRule
    kind: KindRule
    part: str

    @property
    def role(self) -> str:
        """Its content; the part's own name if no rule says it."""
        return self.kind.roles[self.part] or self.part.removeprefix("past_")

    @property
    def family(self) -> str:
        """The kind, whether it has a window or not."""
        return get_family(self.kind.cache)


def convert_name(match: NameMatch, token: str, source: Rules, target: Rules) -> str:
    """Return the name that another profile (`target`) gives a buffer; an empty token is none.

    Raises:
        RulesError: The other profile has no name for such a buffer, or its name would not lead
            back to this one.
    """
    part = find_counterpart(match, target)
    if part is None:
        own = PartOfKind(match.rule, match.kind, match.buffer)
        raise RulesError(
            f"{fill_template(match.rule.templates[match.side], match.groups, match.token)} cannot "
            f"be converted: its content is {own.role} of {own.family}, and profile {target.name} "
            "has no name for that",
            hint="choose a profile with all kinds of buffers that this model has; rules that only "
            "list names, or find them by dataflow, do not say what is in a buffer",
        )
    original = fill_template(match.rule.templates[match.side], match.groups, match.token)
    kept = target.match(match.side, original)
    content = (part.kind.name, part.part, match.layer)
    if kept is not None and (kept.kind.name, kept.buffer, kept.layer) == content:
        return rewrite_name(target, kept, token)  # one of the names that the profile knows
    name = _write_name(match, token, part)
    reread = target.match(match.side, name)
    back = None
    if reread is not None and (reread.kind.name, reread.buffer, reread.layer) == content:
        back_part = find_counterpart(reread, source)
        back = None if back_part is None else _write_name(reread, match.token, back_part)
    if back != original:
        raise RulesError(
            f"{original} cannot be converted to {name} of profile {target.name}: converting that "
            f"name back would give {back or 'no name'}, so the conversion could not be undone",
            hint="keep the names of its own profile",
        )
    return name


def find_counterpart(match: NameMatch, target: Rules) -> PartOfKind | None:
    """Return the part of another profile that is what a name's buffer is; ``None`` for none.

    Of several, the one whose kind has the same name, or the same word, comes first.
    """
    own = PartOfKind(match.rule, match.kind, match.buffer)
    found = [p for p in _list_parts(target) if (p.role, p.family) == (own.role, own.family)]
    found.sort(key=lambda p: (p.kind.name != own.kind.name, p.kind.cache != own.kind.cache))
    return next(iter(found), None)


def list_contents(rules: Rules) -> set[tuple[str, str]]:
    """Return the role and the family of each buffer that a profile has a name for."""
    return {(part.role, part.family) for part in _list_parts(rules)}


def _list_parts(rules: Rules) -> Iterator[PartOfKind]:
    for rule in rules.kv_rules:
        for kind in rule.kinds:
            yield from (PartOfKind(rule, kind, part) for part in kind.roles)


def _write_name(match: NameMatch, token: str, part: PartOfKind) -> str:
    pattern = part.rule.patterns[match.side]
    parts = dict.fromkeys(pattern.groups, "") | dict(part.rule.defaults)
    parts |= {"buffer": part.part, "layer": match.groups["layer"], "token": token}
    if "kind" in parts:
        parts["kind"], _, parts["buffer"] = part.part.partition(".")
    if match.scope and "scope" in parts:
        parts["scope"] = match.scope
    if isinstance(pattern, NameTable):
        parts |= pattern.find_groups(part.part, match.layer)
    return fill_template(part.rule.templates[match.side], parts, token)
