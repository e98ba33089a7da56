"""Pair the KV buffers of a signature by the rules, and decide their new names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.limits import MAX_BUFFERS, MAX_MATCHED_CHARS, build_limit_error, shorten_text
from onnxkvrename.model.signature import Dim, Signature, Value
from onnxkvrename.rules.kinds import is_state
from onnxkvrename.rules.profile import DIM_WORDS, NameMatch, Rules, split_sum

REASON_UNKNOWN = "unknown"
"""The reason for keeping a retained output that matches no rule."""
REASON_TOO_LONG = "too long"
"""The reason for keeping an output whose name no pattern is tried on."""
REASON_NOT_RETAINED = "not retained"
"""The reason for keeping an output that is not a retained state."""
REASON_OTHER_RANK = "input and output differ in rank"
"""The reason for keeping what has the names of an encoder's cache, but is never fed back."""
REASON_POSITION = "position"
"""The reason for keeping what counts the positions of a cache that are written."""
_ZERO = re.compile("(?<![0-9])0+(?![0-9])")
_NO_NAMES: Mapping[str, str] = {}


class TokenChange(NamedTuple):
    """The change that the user asks for.

    Attributes:
        token: The infix token to add; with ``strip`` the one to remove, ``None`` for any.
        strip: Whether to remove the token instead of adding one.
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


@show_briefly
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
        cache: The word that settles what vLLM calls it; empty for `kind`.
        role: What is in it, such as ``key``; empty if the rules do not say.
        axes: A word for each axis, empty for one that the rules do not know; none at all if they
            know none.
        beside: The part that it moves with, if it is not a layer's cache by itself.
        may_be_alone: True if the other side belongs to another model, or to none.
    """

    kind: str
    scope: str
    buffer: str
    layer: int
    input: PairSide | None
    output: PairSide | None
    has_open_kind: bool = False
    cache: str = ""
    role: str = ""
    axes: tuple[str, ...] = ()
    beside: str = ""
    may_be_alone: bool = False

    @property
    def sides(self) -> tuple[PairSide, ...]:
        """The sides that are there, input first."""
        return tuple(side for side in (self.input, self.output) if side is not None)

    @property
    def has_layer(self) -> bool:
        """Whether the names say the layer, so that it is not only assumed."""
        return is_layer_named(self.layer, (side.old_name for side in self.sides))


class KvFeed(NamedTuple):
    """An output with the name of another model's KV input, which it fills.

    A vision encoder has such outputs where a decoder keeps the keys and values of images.

    Attributes:
        kind: The kind of buffer in the rules.
        buffer: The part of the layer, such as ``past_key``.
        layer: The layer, from 0.
        side: The output.
    """

    kind: str
    buffer: str
    layer: int
    side: PairSide


class UnchangedName(NamedTuple):
    """A name that stays as it is, with the reason.

    Attributes:
        name: The name.
        reason: Why it stays.
    """

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
        part_order: The parts that the rules know, in their order.
        required_parts: The parts that a layer must have in this model, by kind.
        old_names: The names of all sides, as they are in the file.
        name_map: Old to new, of all names that change; applied at once.
        output_name_map: The same, of outputs only.
        function_name_map: Old to new, of the names that change in local functions; each function
            has some of them.
        updates_by_kind: How buffers of each kind are meant to be updated, empty where the rules
            do not say.
        feeds: Outputs that fill KV inputs of another model, and are renamed like those.
        is_built_in: True if the rules are a profile of the program, not the user's own.
        runners: Programs that look for the names that the buffers have now, and for no others.
    """

    token_change: TokenChange
    pairs: tuple[KvPair, ...]
    duplicates: tuple[Duplicate, ...]
    unchanged_names: tuple[UnchangedName, ...]
    part_order: tuple[str, ...]
    required_parts: Mapping[str, tuple[str, ...]]
    old_names: frozenset[str]
    name_map: Mapping[str, str]
    output_name_map: Mapping[str, str]
    updates_by_kind: Mapping[str, str]
    feeds: tuple[KvFeed, ...] = ()
    is_built_in: bool = False
    runners: tuple[str, ...] = ()
    function_name_map: Mapping[str, str] = _NO_NAMES

    @property
    def token_counts(self) -> Counter[str]:
        """The number of names that carry each token."""
        sides = (*(s for pair in self.pairs for s in pair.sides), *(f.side for f in self.feeds))
        return Counter(side.token for side in sides if side.token)


def build_rename_plan(signature: Signature, rules: Rules, change: TokenChange) -> RenamePlan:
    """Pair the KV buffers and decide their new names.

    Buffers pair by kind, scope, part and layer, never by position or token. A buffer with one side
    missing is a pair as well: the checks report it.

    Raises:
        RulesError: A rule makes a name that does not lead back to the same buffer.
        ModelError: There are more than `MAX_BUFFERS` buffers.
    """
    matches: dict[tuple[str, str, str, int], NameMatch] = {}
    sides: dict[tuple[str, str, str, int], dict[str, PairSide]] = {}
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
                last = shorten_text(value.name)
                raise build_limit_error(MAX_BUFFERS, f"KV buffers (the last is {last})")
    part_order = rules.part_order
    order = {name: index for index, name in enumerate(part_order)}
    pairs = [_build_pair(match, sides[key], rules) for key, match in matches.items()]
    pairs.sort(key=lambda pair: (pair.layer, order[pair.buffer], pair.scope))
    for lost in [pair for pair in pairs if _is_never_fed_back(pair, rules)]:
        names = [end.old_name for end in lost.sides]
        unchanged |= {name: UnchangedName(name, REASON_OTHER_RANK) for name in names}
        pairs.remove(lost)
    pairs = list(_mark_lone_sides(pairs, rules))
    feeds = tuple(_find_feeds(signature, unchanged, sides, rules, change))
    feed_sides = [feed.side for feed in feeds]
    feed_names = {side.old_name for side in feed_sides}
    all_sides = [side for pair in pairs for side in pair.sides]
    return RenamePlan(
        change,
        tuple(pairs),
        tuple(duplicates),
        tuple(item for item in unchanged.values() if item.name not in feed_names),
        part_order,
        _find_required_parts(pairs, rules),
        old_names=frozenset(side.old_name for side in all_sides),
        name_map=_map_changed_names([*all_sides, *feed_sides]),
        output_name_map=_map_changed_names([*(pair.output for pair in pairs), *feed_sides]),
        updates_by_kind={rule.kind: rule.update for rule in rules.kv_rules},
        feeds=feeds,
        is_built_in=rules.is_built_in,
        runners=tuple(dict.fromkeys(m.rule.runner for m in matches.values() if m.rule.runner)),
    )


def build_minimal_plan(signature: Signature, rules: Rules) -> RenamePlan:
    """Plan a model without a requested change; keep the token that most of its names carry.

    Raises:
        RulesError: A rule makes a name that does not lead back to the same buffer.
    """
    plan = build_rename_plan(signature, rules, TokenChange(None))
    tokens = plan.token_counts.most_common(1)
    return build_rename_plan(signature, rules, TokenChange(tokens[0][0])) if tokens else plan


def is_layer_named(layer: int, names: Iterable[str]) -> bool:
    """Return whether the names of a buffer say its layer: without a number, it is taken as 0."""
    return layer > 0 or any(_ZERO.search(name) for name in names)


def list_parts_in_functions(plan: RenamePlan, rules: Rules) -> tuple[str, ...]:
    """Return the texts that the names of buffers contain in local functions, if they change there.

    They only follow a change of token in the graph, so a model whose graph has all its names stays.
    """
    if not (rules.renames_in_functions and plan.name_map):
        return ()
    return tuple(dict.fromkeys(pair.buffer.rpartition(".")[2] for pair in plan.pairs))


def map_function_names(names: Iterable[str], plan: RenamePlan, rules: Rules) -> dict[str, str]:
    """Return the old and new names of buffers in local functions, whatever their layers are.

    A token there counts if the graph has it too, or the user names it: else it is a part of the
    name of another value. The suffix stays, because nothing pairs names in a function.

    Raises:
        RulesError: A rule makes a name that does not lead back to the same buffer.
    """
    change = plan.token_change
    parts = {(pair.kind, pair.buffer) for pair in plan.pairs}
    tokens = {"", change.token, *plan.token_counts}
    name_map = {}
    for name in names:
        match = rules.match("input", name) or rules.match("output", name)
        if (
            match is not None
            and (match.rule.kind, match.part) in parts
            and match.token in tokens
            and change.can_replace(match.token)
        ):
            name_map[name] = rules.rename(match, change.final_token)
    return {old: new for old, new in name_map.items() if old != new}


def rename_symbols(
    symbols: frozenset[str], producers: Mapping[str, str], plan: RenamePlan
) -> dict[str, str]:
    """Return the old and new symbolic dimensions that are derived from a renamed output.

    torch.onnx names a dimension that it cannot determine after the value: the op type of
    the node, the name, ``_dim_`` and the axis, as in ``Concatpast_key.0_RetainedState_dim_2``.
    Other symbols of a similar form are kept.

    The producers are the op types of the nodes, by the values that they produce.
    """
    return _map_derived_symbols(symbols, producers, plan.output_name_map)


def find_conflicting_symbols(
    symbols: frozenset[str], producers: Mapping[str, str], plan: RenamePlan
) -> frozenset[str]:
    """Return unrelated symbols that would look derived from an output's new name.

    Such a symbol may equal the new form of another symbol, and removing the token again would
    change it.

    The producers are the op types of the nodes, by the values that they produce.
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
    names = {side.old_name: side.new_name for side in sides if side is not None}
    return {old: new for old, new in names.items() if old != new}


def _build_pair_side(value: Value, match: NameMatch, rules: Rules, change: TokenChange) -> PairSide:
    renamed = rules.rename(match, change.final_token, normalize=change.normalize)
    return PairSide(
        value,
        match.token,
        new_name=renamed if change.can_replace(match.token) else value.name,
        has_normal_suffix=rules.normalize_suffix(match) == match.suffix,
    )


def _find_feeds(
    signature: Signature,
    unchanged: Mapping[str, UnchangedName],
    own_buffers: Iterable[tuple[str, str, str, int]],
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
            yield KvFeed(match.rule.kind, match.part, match.layer, side)


def _explain_unchanged(side: str, name: str, rules: Rules) -> str | None:
    if side == "output" and len(name) > MAX_MATCHED_CHARS:
        return REASON_TOO_LONG
    reason = rules.find_reason_to_keep(name)
    if reason is None and side == "output":
        return REASON_UNKNOWN if rules.is_retained_name(name) else REASON_NOT_RETAINED
    return reason


def _build_pair(match: NameMatch, sides: Mapping[str, PairSide], rules: Rules) -> KvPair:
    rule, part = match.rule, match.part
    shapes = (side.value.shape for side in sides.values() if side.value.shape is not None)
    axes = rule.axes.get(part, ())
    return KvPair(
        *match.pair_key,
        sides.get("input"),
        sides.get("output"),
        rule.is_open,
        rule.cache,
        rule.roles[part],
        _name_axes(next(shapes, None), axes, rules.dims) if rules.dims or axes else (),
        rule.beside.get(part, ""),
    )


def _name_axes(
    shape: tuple[Dim, ...] | None, declared: Sequence[str], dims: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a word for each axis of a buffer, empty for an unknown axis; none if all are unknown.

    The words `declared` in the rules are for a buffer of that rank; `dims` is the meaning of
    symbols.
    """
    if shape is None:
        return tuple(declared)
    words = [_find_word(dim, dims) for dim in shape]
    if len(declared) == len(shape):
        words = [
            "window" if (axis, word) == ("sequence", "window") else axis
            for axis, word in zip(declared, words, strict=True)
        ]
    return tuple(words) if any(words) else ()


def _find_word(dim: Dim, dims: Mapping[str, str]) -> str:
    """Return the word for the axis of a size; for a sum, the word of its cached term."""
    if not isinstance(dim, str):
        return ""
    meaning = dims.get(dim, "")
    if meaning in DIM_WORDS:
        return "sequence" if meaning == "new" else meaning
    words = [dims.get(term, "") for term in split_sum(meaning or dim)]
    return next((word for word in words if word in ("window", "sequence")), "")


def _is_never_fed_back(pair: KvPair, rules: Rules) -> bool:
    """Return whether what is written once cannot be its own input in the next step.

    An exporter may have such names for what the model computes again in each step.
    """
    ranks = {len(side.value.shape) for side in pair.sides if side.value.shape is not None}
    return len(ranks) > 1 and rules.kinds[pair.kind].update == "once"


def _mark_lone_sides(pairs: Sequence[KvPair], rules: Rules) -> Iterator[KvPair]:
    """Yield the pairs, with a mark on those of which the rules expect only one side.

    This holds only for a whole kind: if some of its pairs have both sides, the others lost one.
    """
    sides: dict[str, set[tuple[bool, bool]]] = {}
    for pair in pairs:
        sides.setdefault(pair.kind, set()).add((pair.input is not None, pair.output is not None))
    one_side = {"input": {(True, False)}, "output": {(False, True)}}
    kinds = rules.kinds
    for pair in pairs:
        is_alone = any(sides[pair.kind] == one_side[side] for side in kinds[pair.kind].alone)
        yield pair._replace(may_be_alone=True) if is_alone else pair


def _find_required_parts(pairs: Iterable[KvPair], rules: Rules) -> dict[str, tuple[str, ...]]:
    """Return the parts that a layer must have, of states without those that no layer has."""
    used = {(pair.kind, pair.buffer) for pair in pairs}
    required: dict[str, dict[str, None]] = {}
    for rule in rules.kv_rules:
        parts = required.setdefault(rule.kind, {})
        for part in rule.own_parts:
            if not is_state(rule.cache) or (rule.kind, part) in used:
                parts[part] = None
    return {kind: tuple(parts) for kind, parts in required.items()}
