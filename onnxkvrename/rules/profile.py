"""Profiles: which names are KV buffers, how they pair, what they become.

A profile is TOML, never code: patterns for whole names, with a place for the token. The new name
is the old one with another text in that place. ``docs/rules.md`` explains the format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import RulesError
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.pattern import GROUPS, forbid_token, match_name
from onnxkvrename.rules.qefficient import (
    NO_SETS,
    PROFILE,
    WINDOW_SETS,
    SetRule,
)

SIDES = ("input", "output")
EXAMPLE_TOKEN = "VLLM"
_TOKEN_FORMS = ("_{}", "{}_", ".{}", "-{}", "{}")
"""How a name may have a token: the first form that its rule reads back counts."""
_SEPARATORS = "_.-"
TOKEN_LENGTH = 64
"""The most characters of a token."""
UPDATES = ("inplace", "append", "delta", "once")
"""The ways in which a profile may say that buffers are updated; see `layout.updates`."""
AXES = (
    *("batch", "heads", "sequence", "window", "head", "encoder", "blocks", "block", "state"),
    "stack",
)
"""Words for the axes of a buffer: ``head`` is the size of one, ``sequence`` the context.

A ``stack`` has keys and values one after the other.
"""
DIM_WORDS = (*AXES, "new")
"""Words for symbols of sizes: those of axes, and ``new`` for the positions of one step."""
ROLES = (
    *("key", "value", "key_value", "key_scale", "value_scale"),
    *("compressed_kv", "k_pe", "conv_state", "recurrent_state"),
)
"""The possible contents of a part, independent of an exporter's names."""


class KvRule(NamedTuple):
    """The names of KV inputs and outputs of one kind, and what is known of those.

    Attributes:
        file: The file that has it, or the profile.
        number: Its place among the rules there, from 0.
        kind: The kind of buffer. Some rules may have the same one, each with some of its parts.
        cache: The word for what vLLM calls it (`rules.kinds`); the kind if the file says none.
        expressions: The pattern of each side, as a regular expression.
        prefix: What names of parts have in front that names of buffers have elsewhere.
        layer: The layer of names that say none.
        roles: Its parts, each with its content, such as ``key``; empty if that is not known.
        update: How its buffers are meant to be updated, one of `UPDATES`; empty if not known.
        axes: For some parts the words for their axes, some of `AXES`.
        beside: Parts that move with another one and are not a layer's cache by themselves, such as
            the scales of a quantized cache, each with that other part.
        alone: The sides that may exist without the other one, if that is so for all buffers of
            the kind in a model: an encoder's outputs, or the inputs that those fill.
        is_open: Whether some layers use its names for another kind, which their shapes tell.
        runner: A program that looks for these names only; empty for none.
    """

    file: str
    number: int
    kind: str
    cache: str
    expressions: Mapping[str, str]
    prefix: str
    layer: int
    roles: Mapping[str, str]
    update: str
    axes: Mapping[str, tuple[str, ...]]
    beside: Mapping[str, str]
    alone: tuple[str, ...]
    is_open: bool
    runner: str

    @property
    def own_parts(self) -> tuple[str, ...]:
        """The parts that a layer must have: all but those beside others."""
        return tuple([part for part in self.roles if part not in self.beside])

    @property
    def traits(self) -> tuple[object, ...]:
        """What is the same in all rules of a kind."""
        return self.cache, self.update, self.alone, self.is_open

    def says_part(self, side: str) -> bool:
        """Return whether names say the part."""
        return "(?P<part>" in self.expressions[side]

    def match(self, side: str, name: str, *, can_have_token: bool = True) -> NameMatch | None:
        """Split a name, or return ``None`` if this rule does not match it."""
        expression = self.expressions[side]
        found = match_name(expression if can_have_token else forbid_token(expression), name)
        if found is None or (found["token"] is None and not can_have_token):
            return None
        groups = {group: text for group, text in found.groupdict().items() if group in GROUPS}
        if None in groups.values():
            raise RulesError(
                f"kv[{self.number}].{side}: {shorten_text(name)!r} fits, but not all groups take "
                "part in it",
                path=self.file,
                hint="write (?P<token>(?:_[A-Z]+)?) in place of (?:_(?P<token>[A-Z]+))?, and a "
                "[[kv]] for each form of the names",
            )
        token, layer = groups["token"].strip(_SEPARATORS), groups.get("layer", str(self.layer))
        if (token and find_token_error(token)) or not re.fullmatch("[0-9]{1,9}", layer):
            return None
        part = self.prefix + groups["part"] if "part" in groups else next(iter(self.roles))
        if part not in self.roles:
            return None
        return NameMatch(side, self, groups.get("scope", ""), part, int(layer), token, found)


class NameMatch(NamedTuple):
    """The name of a KV buffer, split into its parts.

    Attributes:
        side: ``input`` or ``output``.
        rule: The rule that matches it.
        scope: The prefix of the name in a layerwise export, often empty.
        part: The part of its layer, such as ``past_key``.
        layer: The layer's number.
        token: The infix token, empty if the name has none.
        found: The name, and where its groups are in it.
    """

    side: str
    rule: KvRule
    scope: str
    part: str
    layer: int
    token: str
    found: re.Match[str]

    @property
    def suffix(self) -> str:
        """The text that `Rules.normal_suffixes` may change."""
        return self.found.groupdict().get("suffix", "")

    @property
    def pair_key(self) -> tuple[str, str, str, int]:
        """The key that both sides of a pair share, independent of their tokens."""
        return self.rule.kind, self.scope, self.part, self.layer

    def replace(self, token: str, suffix: str) -> str:
        """Return the name with other texts in the places of the token and the suffix."""
        texts, name = {"token": token, "suffix": suffix}, self.found.string
        places = self.found.re.groupindex
        for group in sorted(texts.keys() & places.keys(), key=places.__getitem__, reverse=True):
            start, end = self.found.span(group)
            name = f"{name[:start]}{texts[group]}{name[end:]}"
        return name

    def is_apart(self, text: str) -> bool:
        """Return whether a text in the place of the token would be a word of its own."""
        (start, end), name = self.found.span("token"), self.found.string
        edges = f"{name[:start][-1:]}{text[:1]}", f"{text[-1:]}{name[end : end + 1]}"
        return not any(len(edge) == 2 and edge.isalnum() for edge in edges)


class ProfileChoice(NamedTuple):
    """Which profile a command uses, and why.

    Attributes:
        name: The profile, or the file of rules.
        picked: Whether the names of the models selected it, not an option.
        also: Other profiles that know some of the names.
    """

    name: str
    picked: bool = False
    also: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the choice as a line of text."""
        best = "best" if self.also else "the names"
        also = "".join(f"; --profile {name} matches some names" for name in self.also)
        return f"using profile {self.name}, which matches {best}{also}"


@show_briefly
class Rules(NamedTuple):
    """A profile, ready for use.

    Attributes:
        name: The name of the profile in messages.
        kv_rules: The names of KV buffers; the first rule that matches counts.
        words: For each side the rules, each with a text that its names contain, or several.
        keep: Patterns of names that are not renamed, each with the reason.
        retained_pattern: The outputs that hold a state, KV or not; ``None`` for those that the
            output pattern of a KV rule matches.
        normal_suffixes: For suffixes that consumers do not match with an input, those that they
            do.
        dims: The meaning of symbols of sizes: a word of `DIM_WORDS`, or a sum of symbols.
        renames_in_functions: Whether local functions have the names of buffers inside, which get
            the token as well.
        sidecars: Patterns of the names of files beside a model that repeat its names, in addition
            to known formats, each with what messages call the program that reads them.
        is_built_in: Whether it is a profile of this program, not the user's own.
        choice: How the profile was picked; ``None`` if the user or the default names it.
    """

    name: str
    kv_rules: tuple[KvRule, ...]
    words: Mapping[str, tuple[tuple[str, KvRule], ...]]
    keep: Mapping[str, str]
    retained_pattern: str | None
    normal_suffixes: Mapping[str, str]
    dims: Mapping[str, str]
    sidecars: Mapping[str, str]
    renames_in_functions: bool = False
    is_built_in: bool = False
    choice: ProfileChoice | None = None

    @property
    def profile_choice(self) -> ProfileChoice:
        """Which profile this is, and how it was picked."""
        return self.choice or ProfileChoice(self.name)

    @property
    def is_qefficient(self) -> bool:
        """Whether these are the rules for exports of QEfficient."""
        return self.is_built_in and self.name == PROFILE

    @property
    def set_rule(self) -> SetRule:
        """The files that are parts of one model."""
        return WINDOW_SETS if self.is_qefficient else NO_SETS

    @property
    def kinds(self) -> dict[str, KvRule]:
        """A rule for each kind, in which all have the same traits."""
        return {rule.kind: rule for rule in reversed(self.kv_rules)}

    @property
    def part_order(self) -> tuple[str, ...]:
        """The parts that the rules know, in the order of their kinds; last those beside others."""
        beside = [part for rule in self.kv_rules for part in rule.beside]
        own = [part for rule in self.kv_rules for part in rule.own_parts]
        return tuple(dict.fromkeys((*own, *beside)))

    def match(self, side: str, name: str) -> NameMatch | None:
        """Split the name of a graph ``input`` or ``output`` by the first rule that matches it.

        One that matches it without a token comes first. A name that a keep rule matches is not a
        KV name, whatever else matches it.
        """
        with_token = None
        for rule in (rule for word, rule in self.words[side] if word in name):
            match = rule.match(side, name)
            if match is not None and match.token and not self.is_built_in:
                match = rule.match(side, name, can_have_token=False) or match
            if match is not None and not match.token:
                break
            with_token = with_token or match
        else:
            match = with_token
        return None if match is None or self.find_reason_to_keep(name) is not None else match

    def rename(self, match: NameMatch, token: str, *, normalize: bool = False) -> str:
        """Return a name with a different token; an empty one is none.

        With `normalize` its suffix becomes one that consumers match with an input.

        Raises:
            RulesError: The new name does not match as the same buffer, layer and token, so the
                rename could not be undone.
        """
        suffix = self.normalize_suffix(match) if normalize else match.suffix
        name = self._find_name(match, token, suffix)
        if name is not None:
            return name
        text = _TOKEN_FORMS[0].format(token) if token else ""
        hints = []
        if self._find_name(match, EXAMPLE_TOKEN, suffix) is not None:
            hints.append(f"choose another token, for example {EXAMPLE_TOKEN}")
        if not self.is_built_in:
            hints.append(
                f"let {{token}} alone match {text or 'a token'}, at the end of a word: list the "
                "words beside it, as in (?P<part>key|value), in place of a wildcard; where the "
                "token comes first, write (?P<token>(?:[A-Za-z0-9]+_)?)"
            )
        word = f"{token} as a word" if token else "no token"
        raise RulesError(
            f"kv[{match.rule.number}].{match.side}: {shorten_text(match.found.string)!r} would "
            f"become {shorten_text(match.replace(text, suffix))!r}, which does not read as "
            f"{match.part}, layer {match.layer}, with {word}",
            path=self.name,
            hint=", or ".join(hints) or None,
        )

    def _find_name(self, match: NameMatch, token: str, suffix: str) -> str | None:
        """Return the name with a token and a suffix, if it reads so and leads back."""
        old = match.found["token"]
        texts = [form.format(token) for form in _TOKEN_FORMS] if token else [""]
        for text in [old] if token == match.token else texts:
            name = match.replace(text, suffix)
            again = match if name == match.found.string else self.match(match.side, name)
            if (
                again is not None
                and (again.pair_key, again.token) == (match.pair_key, token)
                and again.replace(old, match.suffix) == match.found.string
                and (text in (old, token) or match.is_apart(text))
            ):
                return name
        return None

    def normalize_suffix(self, match: NameMatch) -> str:
        """Return the suffix of an output, changed to one that consumers match with an input."""
        return self.normal_suffixes.get(match.suffix, match.suffix)

    def find_reason_to_keep(self, name: str) -> str | None:
        """Return why a name is not renamed, if a rule says so."""
        reasons = (reason for pattern, reason in self.keep.items() if match_name(pattern, name))
        return next(reasons, None)

    def is_retained_name(self, name: str) -> bool:
        """Return whether an output has the name of a retained state, KV or not."""
        if self.retained_pattern is None:
            rules = (rule for word, rule in self.words["output"] if word in name)
            return any(match_name(rule.expressions["output"], name) for rule in rules)
        return match_name(self.retained_pattern, name) is not None


def find_token_error(token: str) -> str | None:
    """Return why a token cannot be used, or ``None`` if it can.

    Consumers read the layer up to the next underscore, and the compiler looks for
    ``_RetainedState`` at the end, so a token may contain neither.
    """
    if not token:
        return "is empty"
    if token.startswith("-"):
        return "begins with -, like an option; an option needs its value directly after it"
    if not re.fullmatch("[A-Za-z0-9]+", token):
        return "may contain only ASCII letters and digits"
    if "RetainedState" in token:
        return "may not contain RetainedState"
    if len(token) > TOKEN_LENGTH:
        return f"is longer than {TOKEN_LENGTH} characters"
    return None


def split_sum(text: str) -> list[str]:
    """Return the terms of a sum of symbols; a single symbol is its only term."""
    return [term.strip() for term in text.split("+")]
