"""Profiles: which names are KV buffers, how they pair, what they become.

A profile is TOML, never code: patterns with named groups that match whole names, and templates
that write the same parts back. ``docs/rules.md`` explains the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.rules.patterns import Pattern
from onnxkvrename.rules.qefficient import (
    NO_SETS,
    PROFILE,
    WINDOW_SETS,
    SetRule,
    format_compile_call,
)

SIDES = ("input", "output")
PLACEHOLDER = re.compile(r"\{([a-z]+)\}|([{}\[\]])")
OPTIONAL_PART = re.compile(r"\[([^\[\]]*)\]")
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


class KindRule(NamedTuple):
    """One kind of buffer, as a profile has it.

    Attributes:
        name: Its name in the profile, by which it differs from other kinds.
        cache: The word for what vLLM calls it (`rules.kinds`); the name if the profile says none.
        roles: Its parts, each with its content, such as ``key``; empty if the profile says none.
        update: How its buffers are meant to be updated, one of `UPDATES`; empty if not known.
        axes: For some parts the words for their axes, some of `AXES`.
        beside: Parts that move with another one and are not a layer's cache by themselves, such as
            the scales of a quantized cache, each with that other part.
        alone: The sides that may exist without the other one, if that is so for all buffers of
            the kind in a model: an encoder's outputs, or the inputs that those fill.
        is_open: Whether some layers use its names for another kind, which their shapes tell.
    """

    name: str
    cache: str
    roles: Mapping[str, str]
    update: str
    axes: Mapping[str, tuple[str, ...]]
    beside: Mapping[str, str]
    alone: tuple[str, ...]
    is_open: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that a layer must have: all but those beside others."""
        return tuple([part for part in self.roles if part not in self.beside])


class NameMatch(NamedTuple):
    """The name of a KV buffer, split into its parts.

    Attributes:
        side: ``input`` or ``output``.
        rule: The rule that matches it.
        kind: The kind of buffer.
        scope: The prefix of the name in a layerwise export, often empty.
        buffer: The part of its layer, such as ``past_key``.
        layer: The layer's number.
        token: The infix token, empty if the name has none.
        groups: All named groups, as in the name.
    """

    side: str
    rule: KvRule
    kind: KindRule
    scope: str
    buffer: str
    layer: int
    token: str
    groups: Mapping[str, str]

    @property
    def pair_key(self) -> tuple[str, str, str, int]:
        """The key that both sides of a pair share, independent of their tokens."""
        return self.kind.name, self.scope, self.buffer, self.layer


class KvRule(NamedTuple):
    """The names of KV inputs and outputs.

    Attributes:
        patterns: For each side the pattern that splits a name.
        templates: For each side the template that writes it.
        kinds: The kinds that have these names; of two with the same part the first one counts.
            Where names say their kind, it is in front of the part, as in ``cross.key``.
        runner: A program that looks for these names only; empty for none.
    """

    patterns: Mapping[str, Pattern]
    templates: Mapping[str, str]
    kinds: tuple[KindRule, ...]
    runner: str = ""

    def match(self, side: str, name: str) -> NameMatch | None:
        """Split a name, or return ``None`` if this rule does not match it."""
        groups = self.patterns[side].match_groups(name)
        if groups is None:
            return None
        if "buffer" not in groups:  # the rule has only one part
            buffer = next(iter(self.kinds[0].roles))
        elif "kind" in groups:
            buffer = f"{groups['kind']}.{groups['buffer']}"
        else:
            buffer = groups["buffer"]
        token, layer = groups.get("token", ""), groups["layer"]
        if (token and find_token_error(token)) or not _is_layer(layer):
            return None
        for kind in self.kinds:
            if buffer in kind.roles:
                scope = groups.get("scope", "")
                return NameMatch(side, self, kind, scope, buffer, int(layer), token, groups)
        return None


def _is_layer(text: str) -> bool:
    """Return whether a text is a number that a layer can have."""
    return text.isascii() and text.isdigit() and len(text) < 10


class KeepRule(NamedTuple):
    """Names that are not renamed, and why."""

    reason: str
    pattern: Pattern


class SidecarRule(NamedTuple):
    """Text files beside a model that repeat its names, one by one or by template.

    Messages name the program that reads them.
    """

    file_pattern: Pattern
    reader: str


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
        kinds: All kinds by their names; the parts of one that several rules have add up.
        keep_rules: Names that are not renamed.
        retained_pattern: The outputs that hold a state, KV or not; ``None`` for those that the
            output pattern of a KV rule matches.
        normal_suffixes: For suffixes that consumers do not match with an input, those that they
            do.
        dims: The meaning of symbols of sizes: a word of `DIM_WORDS`, or a sum of symbols.
        renames_in_functions: Whether local functions have the names of buffers inside, which get
            the token as well.
        sidecar_rules: Files that repeat the names, in addition to those of known formats.
        is_built_in: Whether it is a profile of this program, not the user's own.
        choice: How the profile was picked; ``None`` if the user or the default names it.
    """

    name: str
    kv_rules: tuple[KvRule, ...]
    kinds: Mapping[str, KindRule]
    keep_rules: tuple[KeepRule, ...]
    retained_pattern: Pattern | None
    normal_suffixes: Mapping[str, str]
    dims: Mapping[str, str]
    sidecar_rules: tuple[SidecarRule, ...]
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
    def updates_by_kind(self) -> dict[str, str]:
        """How the buffers of each kind should be updated."""
        return {kind.name: kind.update for kind in self.kinds.values()}

    @property
    def part_order(self) -> tuple[str, ...]:
        """The parts that the rules know, in the order of their kinds; last those beside others."""
        kinds = self.kinds.values()
        own = [part for kind in kinds for part in kind.parts]
        beside = [part for kind in kinds for part in kind.beside]
        return tuple(dict.fromkeys((*own, *beside)))

    def match(self, side: str, name: str) -> NameMatch | None:
        """Split the name of a graph ``input`` or ``output`` by the first rule that matches it.

        A name that a keep rule matches is not a KV name, whatever else matches it.
        """
        matches = (rule.match(side, name) for rule in self.kv_rules)
        match = next((match for match in matches if match is not None), None)
        return None if match is None or self.find_reason_to_keep(name) is not None else match

    def find_reason_to_keep(self, name: str) -> str | None:
        """Return why a name is not renamed, if a rule says so."""
        return next((rule.reason for rule in self.keep_rules if rule.pattern.matches(name)), None)

    def is_retained_name(self, name: str) -> bool:
        """Return whether an output has the name of a retained state, KV or not."""
        if self.retained_pattern is None:
            return any(rule.patterns["output"].matches(name) for rule in self.kv_rules)
        return self.retained_pattern.matches(name)

    def format_feed_back_call(
        self, inputs: Iterable[str], path: str | None, token: str
    ) -> str | None:
        """Return the call that gives a renamed model back to its exporter; ``None`` for none.

        Args:
            inputs: The model's graph inputs.
            path: The renamed model; ``None`` if its exporter finds it without a path.
            token: Its token.
        """
        return format_compile_call(inputs, path, token) if self.is_qefficient else None


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


def fill_template(template: str, parts: Mapping[str, str], token: str) -> str:
    """Return the text of a template; its part in brackets is written only with a token."""
    text = OPTIONAL_PART.sub(lambda part: part[1] if token else "", template)
    return PLACEHOLDER.sub(lambda placeholder: parts[placeholder[1]], text)


def split_sum(text: str) -> list[str]:
    """Return the terms of a sum of symbols; a single symbol is its only term."""
    return [term.strip() for term in text.split("+")]


def find_terms(symbol: str, dims: Mapping[str, str]) -> list[str]:
    """Return the terms of a symbol that is a sum, by the rules or by its own text; else nothing.

    The meaning of symbols in the rules is `dims`.
    """
    meaning = dims.get(symbol, symbol)
    terms = split_sum(symbol if meaning in DIM_WORDS else meaning)
    return terms if len(terms) > 1 else []
