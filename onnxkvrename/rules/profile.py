"""Profiles: which names are KV buffers, how they pair, what they become.

A profile is TOML, never code: patterns with named groups that match whole names in
linear time, and templates that write the same parts back. ``profiles/qeff.toml``
explains the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from onnxkvrename.rules.patterns import Pattern

_NOTHING: Mapping[str, Any] = {}  # rules travel between processes, which a mapping proxy cannot
SIDES = ("input", "output")
PLACEHOLDER = re.compile(r"\{([a-z]+)\}|([{}\[\]])")
OPTIONAL_PART = re.compile(r"\[([^\[\]]*)\]")
TOKEN_LENGTH = 64
"""The most characters of a token."""
WINDOW, PREFIXED, MERGED = STAGES = ("window", "prefixed", "merged")
"""The stages of a set's parts: as exported, prepared for the merge, merged."""
UPDATES = ("inplace", "append", "delta", "once")
"""The ways in which a profile may say that buffers are updated; see `layout.updates`."""
AXES = ("batch", "heads", "sequence", "window", "head", "encoder", "blocks", "block", "state")
"""Words for the axes of a buffer: ``head`` is the size of one, ``sequence`` the context."""
DIM_WORDS = (*AXES, "new")
"""Words for symbols of sizes: those of axes, and ``new`` for the positions of one step."""


ROLES = (
    *("key", "value", "key_value", "key_scale", "value_scale"),
    *("latent", "rope", "conv", "recurrent"),
)
"""The possible contents of a part, independent of an exporter's names."""
CACHE_KINDS = (
    *("attention", "mla", "linear", "cross"),
    *("full_attention", "sliding_window", "chunked_local_attention", "mla_attention"),
    *("sliding_window_mla", "cross_attention", "mamba", "paged_attention"),
)
"""The kinds that decide what vLLM calls a buffer; see `layout.kinds`."""


class KindRule(NamedTuple):
    """The properties of one kind of buffer, beyond the names of its parts.

    Attributes:
        cache: The kind that decides what vLLM calls it; empty for the kind's own name.
        roles: The content of each part, such as ``key``.
        axes: For some parts the words for their axes, some of `AXES`.
        optional: The parts that a layer may lack.
        beside: Parts that move with another one and are not a layer's cache by themselves, such as
            the scales of a quantized cache, each with that other part.
        alone: The sides that may exist without the other one, if that is so for all buffers of
            the kind in a model: an encoder's outputs, or the inputs that those fill.
    """

    cache: str = ""
    roles: Mapping[str, str] = _NOTHING
    axes: Mapping[str, tuple[str, ...]] = _NOTHING
    optional: frozenset[str] = frozenset()
    beside: Mapping[str, str] = _NOTHING
    alone: tuple[str, ...] = ()


_PLAIN_KIND = KindRule()


class NameMatch(NamedTuple):
    """The name of a KV buffer, split into its parts.

    Attributes:
        side: ``input`` or ``output``.
        rule: The rule that matches it.
        kind: The kind of buffer, such as ``attention``.
        scope: The prefix of the name in a layerwise export, often empty.
        buffer: The part of its layer, such as ``past_key``.
        layer: The layer's number.
        token: The infix token, empty if the name has none.
        groups: All named groups, as in the name.
    """

    side: str
    rule: KvRule
    kind: str
    scope: str
    buffer: str
    layer: int
    token: str
    groups: Mapping[str, str]

    @property
    def pair_key(self) -> tuple[str, str, int]:
        """The key that both sides of a pair share, independent of their tokens."""
        return self.scope, self.buffer, self.layer


class KvRule(NamedTuple):
    """The names of KV inputs and outputs.

    Attributes:
        patterns: For each side the pattern that splits a name.
        templates: For each side the template that writes it.
        buffers_by_kind: For each kind the buffers that a layer of it must have.
        kinds_by_buffer: For each buffer the first kind that has it.
        updates: Some kinds, each with how its buffers are meant to be updated.
        open_kinds: Kinds whose buffers may also be of other kinds, as their shapes say.
        kind_rules: Further properties of some kinds.
        defaults: The values of groups in a name that is converted from another profile.
    """

    patterns: Mapping[str, Pattern]
    templates: Mapping[str, str]
    buffers_by_kind: Mapping[str, tuple[str, ...]]
    kinds_by_buffer: Mapping[str, str]
    updates: tuple[tuple[str, str], ...] = ()
    open_kinds: frozenset[str] = frozenset()
    kind_rules: Mapping[str, KindRule] = _NOTHING
    defaults: Mapping[str, str] = _NOTHING

    def get_kind_rule(self, kind: str) -> KindRule:
        """Return the properties of a kind beyond the names of its parts."""
        return self.kind_rules.get(kind, _PLAIN_KIND)

    def match(self, side: str, name: str) -> NameMatch | None:
        """Split a name, or return ``None`` if this rule does not match it."""
        parts = self.patterns[side].match_groups(name)
        if parts is None:
            return None
        # A rule without this group has only one part.
        buffer = parts["buffer"] if "buffer" in parts else next(iter(self.kinds_by_buffer))
        token = parts.get("token", "")
        kind = self.kinds_by_buffer.get(buffer)
        if kind is None or (token and find_token_error(token)) or not _is_layer(parts["layer"]):
            return None
        layer, scope = int(parts["layer"]), parts.get("scope", "")
        return NameMatch(side, self, kind, scope, buffer, layer, token, parts)


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


class FeedBackRule(NamedTuple):
    """The call that gives a renamed model back to its exporter, for models with some input."""

    input_pattern: Pattern
    call_template: str


class BranchRule(NamedTuple):
    """An input that chooses a branch: one for the first step, which has no cache yet, or not.

    The input is a truth value; `first` is its value in the first step, later it is the opposite.
    """

    input_name: str
    first: bool


class PartName(NamedTuple):
    """The stage and layers in the file name of a part.

    Attributes:
        stage: One of `STAGES`.
        model_name: The model's name, empty if the file name does not say it.
        first_layer: The first layer.
        end_layer: The layer after the last, ``None`` if the file name does not say it.
    """

    stage: str
    model_name: str
    first_layer: int
    end_layer: int | None


class PartPath(NamedTuple):
    """The location of a part of a set, and the content of its file name.

    Attributes:
        root: The directory that all files of the set have in common, with ``/`` between
            names; empty for the working directory.
        name: The stage, model and layers that the file name says.
    """

    root: str
    name: PartName


class PartRule(NamedTuple):
    """The names of the files of one stage, and of the folder around each, if there is one."""

    stage: str
    file_pattern: Pattern
    folder_pattern: Pattern | None

    def match(self, file: str) -> PartName | None:
        """Split the name of a file, or return ``None`` if it does not match."""
        parts = self.file_pattern.match_groups(file) or {"first": ""}
        first, end = parts["first"], parts.get("end", "")
        if not all(_is_layer(layer) for layer in (first, end or first)):
            return None
        return PartName(self.stage, parts.get("model", ""), int(first), int(end) if end else None)


class SetRule(NamedTuple):
    """The files that are parts of one model, and their common values.

    Attributes:
        part_rules: The names of the files; the first that matches counts.
        seam: The output of a window, and the input of the next one that receives it.
        shared_inputs: The inputs that all windows share.
        exclusive_kinds: Kinds of buffers of which a model has at most one.
    """

    part_rules: tuple[PartRule, ...] = ()
    seam: tuple[str, str] | None = None
    shared_inputs: tuple[str, ...] = ()
    exclusive_kinds: frozenset[str] = frozenset()

    def parse_path(self, path: str) -> PartPath | None:
        """Return what the path of a model, with ``/`` between names, says about a set.

        ``None`` outside of sets.
        """
        *directories, file = path.split("/")
        kept_directories = [name for name in directories if name not in ("", ".")]
        for rule in self.part_rules:
            name = rule.match(file)
            if name is not None:
                if (
                    rule.folder_pattern is not None
                    and kept_directories
                    and rule.folder_pattern.matches(kept_directories[-1])
                ):
                    kept_directories.pop()
                return PartPath("/" * path.startswith("/") + "/".join(kept_directories), name)
        return None

    def is_window_path(self, path: str) -> bool:
        """Return whether a path, with ``/`` between names, is that of one window of a model."""
        part = self.parse_path(path)
        return part is not None and part.name.stage != MERGED


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
        also = "".join(f"; --profile {name} also knows some" for name in self.also)
        return f"profile {self.name} knows these names{also}"


class Rules(NamedTuple):
    """A profile, ready for use.

    Attributes:
        name: The name of the profile in messages.
        kv_rules: The names of KV buffers; the first rule that matches counts.
        keep_rules: Names that are not renamed.
        retained_pattern: The outputs that hold a state, KV or not; ``None`` for those that the
            output pattern of a KV rule matches.
        normal_suffixes: For suffixes that consumers do not match with an input, those that they
            do.
        feed_back_rules: How to give the model back; the first that matches counts.
        set_rule: The files that are parts of one model.
        update: How buffers should be updated, one of `UPDATES`; empty if it does not say.
        dims: The meaning of symbols of sizes: a word of `DIM_WORDS`, or a sum of symbols.
        branches: Inputs that choose a branch of the graph by the step.
        sidecar_rules: Files that repeat the names, in addition to those of known formats.
        choice: How the profile was picked; ``None`` if the user or the default names it.
        target: The profile whose names the buffers get; ``None`` for this one's.
    """

    name: str
    kv_rules: tuple[KvRule, ...]
    keep_rules: tuple[KeepRule, ...]
    retained_pattern: Pattern | None
    normal_suffixes: Mapping[str, str]
    feed_back_rules: tuple[FeedBackRule, ...]
    set_rule: SetRule = SetRule()
    update: str = ""
    dims: Mapping[str, str] = _NOTHING
    branches: tuple[BranchRule, ...] = ()
    sidecar_rules: tuple[SidecarRule, ...] = ()
    choice: ProfileChoice | None = None
    target: Rules | None = None

    @property
    def profile_choice(self) -> ProfileChoice:
        """Which profile this is, and how it was picked."""
        return self.choice or ProfileChoice(self.name)

    @property
    def updates_by_kind(self) -> dict[str, str]:
        """How the buffers of each kind should be updated, over all rules."""
        kinds = (kind for rule in self.kv_rules for kind in rule.buffers_by_kind)
        updates = dict.fromkeys(kinds, self.update)
        return updates | {kind: update for rule in self.kv_rules for kind, update in rule.updates}

    @property
    def part_order(self) -> tuple[str, ...]:
        """The parts that the rules know, in the order of rules and kinds."""
        groups = [each for rule in self.kv_rules for each in rule.buffers_by_kind.values()]
        groups += [tuple(rule.kinds_by_buffer) for rule in self.kv_rules]  # parts beside others
        return tuple(dict.fromkeys(name for group in groups for name in group))

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

    def format_feed_back_call(self, inputs: Iterable[str], path: str, token: str) -> str | None:
        """Return the call that gives a renamed model back to its exporter.

        Args:
            inputs: The model's graph inputs.
            path: The renamed model.
            token: Its token.

        Returns:
            The call as Python source, or ``None`` if the profile has none for such a model.
        """
        names = list(inputs)
        for rule in self.feed_back_rules:
            if any(rule.input_pattern.matches(name) for name in names):
                quoted = path.replace("\\", "\\\\").replace('"', '\\"')
                return fill_template(rule.call_template, {"path": quoted, "token": token}, token)
        return None


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
