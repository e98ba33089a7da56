"""Signature and rules to pairs and new names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.profile import NameMatch, Rules

REASON_UNKNOWN = "unknown"
"""Why a retained output is kept that no rule knows."""
REASON_NOT_RETAINED = "not retained"
"""Why an output is kept that is no retained state."""


class TokenChange(NamedTuple):
    """What is asked for.

    ``token`` is the one to put in; with ``strip`` the one to take out, ``None``
    for any. ``replace`` allows another token to give way; ``normalize`` gives
    outputs the suffix that consumers pair.
    """

    token: str | None
    strip: bool = False
    replace: bool = False
    normalize: bool = False

    @property
    def final_token(self) -> str:
        """The token that every name shall carry in the end, empty for none."""
        return "" if self.strip or self.token is None else self.token

    def can_replace(self, token: str) -> bool:
        """Whether a name that carries ``token`` may be renamed."""
        if token in ("", self.final_token) or self.replace:
            return True
        return self.strip and self.token in (None, token)


class PairSide(NamedTuple):
    """One side of a pair: the value as it stands, and its name to be."""

    value: Value
    token: str
    new_name: str
    has_normal_suffix: bool = True

    @property
    def old_name(self) -> str:
        """The name as it stands."""
        return self.value.name


class KvPair(NamedTuple):
    """A KV buffer: a graph input and the retained output that carries it on.

    A pair with one side missing is kept as found, for the checks to name.
    """

    kind: str
    scope: str
    buffer: str
    layer: int
    input: PairSide | None
    output: PairSide | None

    @property
    def sides(self) -> tuple[PairSide, ...]:
        """The sides that are there, input first."""
        return tuple(end for end in (self.input, self.output) if end is not None)


class UnchangedName(NamedTuple):
    """A name that stays, and why."""

    name: str
    reason: str


def build_name_map(pairs: Iterable[KvPair]) -> dict[str, str]:
    """Old to new, of the names that change in these pairs."""
    return {
        end.old_name: end.new_name
        for pair in pairs
        for end in pair.sides
        if end.old_name != end.new_name
    }


class RenamePlan(NamedTuple):
    """What is to become of a model's names.

    ``doubles`` are names that claim a side already taken, by their pair.
    ``parts`` lists, for each kind of buffer, the parts a layer must have.
    """

    token_change: TokenChange
    pairs: tuple[KvPair, ...]
    duplicates: tuple[tuple[str, str], ...]
    unchanged_names: tuple[UnchangedName, ...]
    buffers_by_kind: Mapping[str, tuple[str, ...]]

    @property
    def name_map(self) -> dict[str, str]:
        """Old to new, of the names that change: one mapping, carried out at once."""
        return build_name_map(self.pairs)

    @property
    def token_counts(self) -> Counter[str]:
        """The tokens that names carry, and how many carry each."""
        return Counter(end.token for pair in self.pairs for end in pair.sides if end.token)

    @property
    def output_name_map(self) -> dict[str, str]:
        """Old to new, of the outputs whose names change."""
        ends = [pair.output for pair in self.pairs if pair.output is not None]
        return {end.old_name: end.new_name for end in ends if end.old_name != end.new_name}


def build_rename_plan(signature: Signature, rules: Rules, wish: TokenChange) -> RenamePlan:
    """Pair the KV buffers by scope, buffer and layer, never by position or token.

    Raises :class:`RulesError` where a template does not lead back to its name.
    """
    matches: dict[tuple[str, str, int], NameMatch] = {}
    ends: dict[tuple[str, str, int], dict[str, PairSide]] = {}
    doubles: list[tuple[str, str]] = []
    kept: dict[str, UnchangedName] = {}
    for side, values in (("input", signature.inputs), ("output", signature.outputs)):
        for value in values:
            match = rules.match(side, value.name)
            if match is None:
                reason = _explain_unchanged(side, value.name, rules)
                if reason is not None:
                    kept.setdefault(value.name, UnchangedName(value.name, reason))
                continue
            key = matches.setdefault(match.pair_key, match).pair_key
            found = ends.setdefault(key, {})
            if side in found:
                doubles.append((value.name, found[side].old_name))
            else:
                found[side] = _build_pair_side(value, match, rules, wish)
    pairs = [
        KvPair(match.kind, *key, ends[key].get("input"), ends[key].get("output"))
        for key, match in matches.items()
    ]
    parts = rules.buffers_by_kind
    order = {name: at for at, name in enumerate(n for names in parts.values() for n in names)}
    pairs.sort(key=lambda pair: (pair.layer, order[pair.buffer], pair.scope))
    return RenamePlan(wish, tuple(pairs), tuple(doubles), tuple(kept.values()), parts)


def build_minimal_plan(signature: Signature, rules: Rules) -> RenamePlan:
    """The plan that changes least: it wishes for the token that most names carry."""
    found = build_rename_plan(signature, rules, TokenChange(None))
    tokens = found.token_counts.most_common(1)
    return build_rename_plan(signature, rules, TokenChange(tokens[0][0])) if tokens else found


def rename_symbols(
    symbols: frozenset[str], producers: Mapping[str, str], plan: RenamePlan
) -> dict[str, str]:
    """The symbols that an exporter made of a renamed output's name, old to new.

    torch.onnx calls a dimension it cannot tell after the value: op type of the
    node, name, ``_dim_`` and the axis, as in
    ``Concatpast_key.0_RetainedState_dim_2``. Others that look alike stay.
    """
    return _map_derived_symbols(symbols, producers, plan.output_name_map)


def find_conflicting_symbols(
    symbols: frozenset[str], producers: Mapping[str, str], plan: RenamePlan
) -> frozenset[str]:
    """The symbols that would count as made of an output's new name, though they are not.

    One may be the very name that another symbol gets; and taking the token out
    again would change any of them.
    """
    outputs = plan.output_name_map
    news = {outputs.get(name, name): op_type for name, op_type in producers.items()}
    staying = symbols - rename_symbols(symbols, producers, plan).keys()
    return frozenset(
        _map_derived_symbols(staying, news, {new: old for old, new in outputs.items()})
    )


def _map_derived_symbols(
    symbols: frozenset[str], producers: Mapping[str, str], outputs: Mapping[str, str]
) -> dict[str, str]:
    heads = {
        op_type + old: op_type + new
        for old, new in outputs.items()
        for op_type in {"", producers.get(old, "")}
    }
    followed = {}
    for symbol in symbols:
        head, _, axis = symbol.rpartition("_dim_")
        if head in heads and axis.isascii() and axis.isdigit():
            followed[symbol] = f"{heads[head]}_dim_{axis}"
    return followed


def _build_pair_side(value: Value, match: NameMatch, rules: Rules, wish: TokenChange) -> PairSide:
    new = rules.rewrite_name(match, wish.final_token, normalize=wish.normalize)
    normal = rules.normalize_suffix(match) == match.groups.get("suffix", "")
    return PairSide(
        value, match.token, new if wish.can_replace(match.token) else value.name, normal
    )


def _explain_unchanged(side: str, name: str, rules: Rules) -> str | None:
    reason = rules.find_reason_to_keep(name)
    if reason is None and side == "output":
        return REASON_UNKNOWN if rules.is_retained_name(name) else REASON_NOT_RETAINED
    return reason
