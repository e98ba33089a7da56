"""Pair the KV buffers of a signature by the rules, and decide their new names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.profile import NameMatch, Rules

MAX_BUFFERS = 1 << 12
"""KV buffers of a model, and names that claim one that another name has."""
REASON_UNKNOWN = "unknown"
"""The reason for keeping a retained output that matches no rule."""
REASON_NOT_RETAINED = "not retained"
"""The reason for keeping an output that is not a retained state."""
_STATE_KINDS = ("linear", "mamba")
"""Kinds of which some models have only one part, such as the convolution's."""


class TokenChange(NamedTuple):
    """The change that the user asks for.

    Attributes:
        token: The infix token to put in; with ``strip`` the one to take out, ``None`` for any.
        strip: Whether to take the token out instead of putting one in.
        replace: Whether a different token in a name may be replaced.
        normalize: Whether outputs get the suffix that consumers pair with an input.
    """

    token: str | None
    strip: bool = False
    replace: bool = False
    normalize: bool = False

    @property
    def final_token(self) -> str:
        """The token that every KV name carries in the end; empty for none."""
        return "" if self.strip or self.token is None else self.token

    def can_replace(self, token: str) -> bool:
        """Return whether a name that carries ``token``, or none if empty, may be renamed."""
        if token in ("", self.final_token) or self.replace:
            return True
        return self.strip and self.token in (None, token)


class PairSide(NamedTuple):
    """One side of a pair: a graph input or output.

    Attributes:
        value: The input or output as it is in the file.
        token: The token in its name; empty for none.
        new_name: The name that it gets; its old one if it stays.
        has_normal_suffix: Whether its suffix is one that consumers pair.
    """

    value: Value
    token: str
    new_name: str
    has_normal_suffix: bool = True

    @property
    def old_name(self) -> str:
        """The name in the file."""
        return self.value.name


class KvPair(NamedTuple):
    """A KV buffer: a graph input, and the retained output that carries it to the next step.

    Attributes:
        kind: The kind of buffer in the rules, such as ``attention``.
        scope: The prefix of the name in models of several parts; usually empty.
        buffer: The part of the layer, such as ``past_key``.
        layer: The layer, from 0.
        input: The input; ``None`` if it is missing.
        output: The retained output; ``None`` if it is missing.
        has_open_kind: True if the rules leave it to the shape what kind of cache it is.
    """

    kind: str
    scope: str
    buffer: str
    layer: int
    input: PairSide | None
    output: PairSide | None
    has_open_kind: bool = False

    @property
    def sides(self) -> tuple[PairSide, ...]:
        """The sides that are there, input first."""
        return tuple(side for side in (self.input, self.output) if side is not None)


class KvFeed(NamedTuple):
    """An output with the name of another model's KV input, which it fills.

    A vision encoder has such outputs where a decoder keeps the keys and values of images.

    Attributes:
        buffer: The part of the layer, such as ``past_key``.
        layer: The layer, from 0.
        side: The output.
    """

    buffer: str
    layer: int
    side: PairSide


class UnchangedName(NamedTuple):
    """A name that stays as it is, with the reason."""

    name: str
    reason: str


class Duplicate(NamedTuple):
    """Two names of one side that the rules read as the same buffer.

    Attributes:
        name: The one that comes later, and is left out of the pairs.
        first_name: The one that has the buffer's side.
        token: The token in `name`; empty for none.
        first_token: The token in `first_name`.
    """

    name: str
    first_name: str
    token: str
    first_token: str

    @property
    def name_with_token(self) -> str | None:
        """The name that is read with a token, if the other one has none."""
        if bool(self.token) == bool(self.first_token):
            return None
        return self.name if self.token else self.first_name


class RenamePlan(NamedTuple):
    """The pairs of a model, and the new name of each side.

    Attributes:
        token_change: The change that the user asks for.
        pairs: The KV buffers, by layer.
        duplicates: Names that claim a side which another name has.
        unchanged_names: Names that a rule leaves alone, and other outputs.
        buffers_by_kind: The parts that a layer of each kind must have in this model.
        old_names: The names of all sides, as they are in the file.
        name_map: Old to new, of all names that change; applied at once.
        output_name_map: The same, of outputs only.
        updates_by_kind: How buffers of each kind are meant to be updated, empty where the rules
            do not say.
        feeds: Outputs that fill KV inputs of another model, and are renamed like those.
    """

    token_change: TokenChange
    pairs: tuple[KvPair, ...]
    duplicates: tuple[Duplicate, ...]
    unchanged_names: tuple[UnchangedName, ...]
    buffers_by_kind: Mapping[str, tuple[str, ...]]
    old_names: frozenset[str]
    name_map: Mapping[str, str]
    output_name_map: Mapping[str, str]
    updates_by_kind: Mapping[str, str]
    feeds: tuple[KvFeed, ...] = ()

    @property
    def token_counts(self) -> Counter[str]:
        """The number of names that carry each token."""
        sides = (*(s for pair in self.pairs for s in pair.sides), *(f.side for f in self.feeds))
        return Counter(side.token for side in sides if side.token)


def build_rename_plan(signature: Signature, rules: Rules, change: TokenChange) -> RenamePlan:
    """Pair the KV buffers and decide their new names.

    Buffers pair by scope, part and layer, never by position or token. A buffer with one side
    missing is a pair as well: the checks report it.

    Args:
        signature: The graph inputs and outputs.
        rules: The rules that recognise KV names.
        change: The token to put in or take out.

    Raises:
        RulesError: A template makes a name that does not lead back to the same buffer.
        ModelError: There are more than `MAX_BUFFERS` buffers.
    """
    matches: dict[tuple[str, str, int], NameMatch] = {}
    sides: dict[tuple[str, str, int], dict[str, PairSide]] = {}
    duplicates: list[Duplicate] = []
    unchanged: dict[str, UnchangedName] = {}
    for side, values in (("input", signature.inputs), ("output", signature.outputs)):
        for value in values:
            match = rules.match(side, value.name)
            if match is None:
                reason = _explain_unchanged(side, value.name, rules)
                if reason is not None:
                    unchanged.setdefault(value.name, UnchangedName(value.name, reason))
                continue
            key = matches.setdefault(match.pair_key, match).pair_key
            pair_sides = sides.setdefault(key, {})
            if side in pair_sides:
                first = pair_sides[side]
                duplicates.append(Duplicate(value.name, first.old_name, match.token, first.token))
            else:
                pair_sides[side] = _build_pair_side(value, match, rules, change)
            if max(len(matches), len(duplicates)) > MAX_BUFFERS:
                raise ModelError(
                    f"has more than {MAX_BUFFERS:,} KV buffers (the last is {value.name[:80]})",
                    hint="no exporter makes so many; if one does, please report it",
                )
    buffers_by_kind = rules.buffers_by_kind
    order = {name: index for index, name in enumerate(_flatten(buffers_by_kind.values()))}
    pairs = [
        KvPair(
            match.kind,
            *key,
            sides[key].get("input"),
            sides[key].get("output"),
            match.kind in match.rule.open_kinds,
        )
        for key, match in matches.items()
    ]
    pairs.sort(key=lambda pair: (pair.layer, order[pair.buffer], pair.scope))
    feeds = tuple(_find_feeds(signature, unchanged, sides, rules, change))
    feed_names = {feed.side.old_name for feed in feeds}
    return RenamePlan(
        change,
        tuple(pairs),
        tuple(duplicates),
        tuple(item for item in unchanged.values() if item.name not in feed_names),
        _drop_optional_buffers(buffers_by_kind, pairs),
        old_names=frozenset(side.value.name for pair in pairs for side in pair.sides),
        name_map=build_name_map(pairs) | _map_changed_names(feed.side for feed in feeds),
        output_name_map=_map_changed_names(
            [*(pair.output for pair in pairs), *(feed.side for feed in feeds)]
        ),
        updates_by_kind=rules.updates_by_kind,
        feeds=feeds,
    )


def build_minimal_plan(signature: Signature, rules: Rules) -> RenamePlan:
    """Plan a model without a requested change; keep the token that most of its names carry.

    Args:
        signature: The graph inputs and outputs.
        rules: The rules that recognise KV names.

    Raises:
        RulesError: A template makes a name that does not lead back to the same buffer.
    """
    plan = build_rename_plan(signature, rules, TokenChange(None))
    tokens = plan.token_counts.most_common(1)
    return build_rename_plan(signature, rules, TokenChange(tokens[0][0])) if tokens else plan


def build_name_map(pairs: Iterable[KvPair]) -> dict[str, str]:
    """Return the old and new names of the sides that change."""
    return _map_changed_names(side for pair in pairs for side in pair.sides)


def rename_symbols(
    symbols: frozenset[str], producers: Mapping[str, str], plan: RenamePlan
) -> dict[str, str]:
    """Return the old and new symbolic dimensions that are derived from a renamed output.

    torch.onnx names a dimension that it cannot determine after the value: the op type of
    the node, the name, ``_dim_`` and the axis, as in ``Concatpast_key.0_RetainedState_dim_2``.
    Other symbols of a similar form are kept.

    Args:
        symbols: All symbolic dimensions of the model.
        producers: The op type of the node that produces each value.
        plan: The new names.
    """
    return _map_derived_symbols(symbols, producers, plan.output_name_map)


def find_conflicting_symbols(
    symbols: frozenset[str], producers: Mapping[str, str], plan: RenamePlan
) -> frozenset[str]:
    """Return unrelated symbols that would look derived from an output's new name.

    Such a symbol may equal the new form of another symbol, and removing the token again would
    change it.

    Args:
        symbols: All symbolic dimensions of the model.
        producers: The op type of the node that produces each value.
        plan: The new names.
    """
    outputs = plan.output_name_map
    new_producers = {outputs.get(name, name): op_type for name, op_type in producers.items()}
    staying = symbols - rename_symbols(symbols, producers, plan).keys()
    old_by_new = {new: old for old, new in outputs.items()}
    return frozenset(_map_derived_symbols(staying, new_producers, old_by_new))


def _map_derived_symbols(
    symbols: frozenset[str], producers: Mapping[str, str], outputs: Mapping[str, str]
) -> dict[str, str]:
    heads = {
        op_type + old: op_type + new
        for old, new in outputs.items()
        for op_type in {"", producers.get(old, "")}
    }
    symbol_map = {}
    for symbol in symbols:
        head, _, axis = symbol.rpartition("_dim_")
        if head in heads and axis.isascii() and axis.isdigit():
            symbol_map[symbol] = f"{heads[head]}_dim_{axis}"
    return symbol_map


def _map_changed_names(sides: Iterable[PairSide | None]) -> dict[str, str]:
    return {
        side.value.name: side.new_name
        for side in sides
        if side is not None and side.value.name != side.new_name
    }


def _build_pair_side(value: Value, match: NameMatch, rules: Rules, change: TokenChange) -> PairSide:
    renamed = rules.rewrite_name(match, change.final_token, normalize=change.normalize)
    return PairSide(
        value,
        match.token,
        new_name=renamed if change.can_replace(match.token) else value.name,
        has_normal_suffix=rules.normalize_suffix(match) == match.groups.get("suffix", ""),
    )


def _find_feeds(
    signature: Signature,
    unchanged: Mapping[str, UnchangedName],
    own_buffers: Iterable[tuple[str, str, int]],
    rules: Rules,
    change: TokenChange,
) -> Iterator[KvFeed]:
    """Yield the outputs that have the name of a KV input, which is not one of this model."""
    own_keys = set(own_buffers)
    for value in signature.outputs:
        if value.name not in unchanged or unchanged[value.name].reason != REASON_NOT_RETAINED:
            continue
        match = rules.match("input", value.name)
        if match is not None and match.pair_key not in own_keys:
            side = _build_pair_side(value, match, rules, change)
            yield KvFeed(match.buffer, match.layer, side)


def _explain_unchanged(side: str, name: str, rules: Rules) -> str | None:
    reason = rules.find_reason_to_keep(name)
    if reason is None and side == "output":
        return REASON_UNKNOWN if rules.is_retained_name(name) else REASON_NOT_RETAINED
    return reason


def _drop_optional_buffers(
    buffers_by_kind: Mapping[str, tuple[str, ...]], pairs: Iterable[KvPair]
) -> dict[str, tuple[str, ...]]:
    """Return the parts of each kind, of states without those that no layer of the model has."""
    used = {pair.buffer for pair in pairs}
    return {
        kind: tuple(name for name in buffers if name in used or kind not in _STATE_KINDS)
        for kind, buffers in buffers_by_kind.items()
    }


def _flatten(groups: Iterable[Iterable[str]]) -> Iterable[str]:
    return (name for group in groups for name in group)
