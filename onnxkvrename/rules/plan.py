"""Signature and rules to pairs and new names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.profile import Match, Rules

UNKNOWN = "unknown"
"""Why a retained output is kept that no rule knows."""
PLAIN = "not retained"
"""Why an output is kept that is no retained state."""


class Wish(NamedTuple):
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
    def target(self) -> str:
        """The token that every name shall carry in the end, empty for none."""
        return "" if self.strip or self.token is None else self.token

    def yields(self, token: str) -> bool:
        """Whether a name that carries ``token`` may be renamed."""
        if token in ("", self.target) or self.replace:
            return True
        return self.strip and self.token in (None, token)


class End(NamedTuple):
    """One side of a pair: the value as it stands, and its name to be."""

    value: Value
    token: str
    new: str
    normal: bool = True

    @property
    def old(self) -> str:
        """The name as it stands."""
        return self.value.name


class Pair(NamedTuple):
    """A KV buffer: a graph input and the retained output that carries it on.

    A pair with one side missing is kept as found, for the checks to name.
    """

    kind: str
    scope: str
    buffer: str
    layer: int
    input: End | None
    output: End | None

    @property
    def ends(self) -> tuple[End, ...]:
        """The sides that are there, input first."""
        return tuple(end for end in (self.input, self.output) if end is not None)


class Kept(NamedTuple):
    """A name that stays, and why."""

    name: str
    reason: str


def changes(pairs: Iterable[Pair]) -> dict[str, str]:
    """Old to new, of the names that change in these pairs."""
    return {end.old: end.new for pair in pairs for end in pair.ends if end.old != end.new}


class Plan(NamedTuple):
    """What is to become of a model's names.

    ``doubles`` are names that claim a side already taken, by their pair.
    ``parts`` lists, for each kind of buffer, the parts a layer must have.
    """

    wish: Wish
    pairs: tuple[Pair, ...]
    doubles: tuple[tuple[str, str], ...]
    kept: tuple[Kept, ...]
    parts: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> dict[str, str]:
        """Old to new, of the names that change: one mapping, carried out at once."""
        return changes(self.pairs)

    @property
    def tokens(self) -> Counter[str]:
        """The tokens that names carry, and how many carry each."""
        return Counter(end.token for pair in self.pairs for end in pair.ends if end.token)

    @property
    def outputs(self) -> dict[str, str]:
        """Old to new, of the outputs whose names change."""
        ends = [pair.output for pair in self.pairs if pair.output is not None]
        return {end.old: end.new for end in ends if end.old != end.new}


def plan(signature: Signature, rules: Rules, wish: Wish) -> Plan:
    """Pair the KV buffers by scope, buffer and layer, never by position or token.

    Raises :class:`RulesError` where a template does not lead back to its name.
    """
    matches: dict[tuple[str, str, int], Match] = {}
    ends: dict[tuple[str, str, int], dict[str, End]] = {}
    doubles: list[tuple[str, str]] = []
    kept: dict[str, Kept] = {}
    for side, values in (("input", signature.inputs), ("output", signature.outputs)):
        for value in values:
            match = rules.match(side, value.name)
            if match is None:
                reason = _why_kept(side, value.name, rules)
                if reason is not None:
                    kept.setdefault(value.name, Kept(value.name, reason))
                continue
            key = matches.setdefault(match.key, match).key
            found = ends.setdefault(key, {})
            if side in found:
                doubles.append((value.name, found[side].old))
            else:
                found[side] = _end(value, match, rules, wish)
    pairs = [
        Pair(match.kind, *key, ends[key].get("input"), ends[key].get("output"))
        for key, match in matches.items()
    ]
    parts = rules.parts
    order = {name: at for at, name in enumerate(n for names in parts.values() for n in names)}
    pairs.sort(key=lambda pair: (pair.layer, order[pair.buffer], pair.scope))
    return Plan(wish, tuple(pairs), tuple(doubles), tuple(kept.values()), parts)


def as_it_stands(signature: Signature, rules: Rules) -> Plan:
    """The plan that changes least: it wishes for the token that most names carry."""
    found = plan(signature, rules, Wish(None))
    tokens = found.tokens.most_common(1)
    return plan(signature, rules, Wish(tokens[0][0])) if tokens else found


def follow(symbols: frozenset[str], producers: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """The symbols that an exporter made of a renamed output's name, old to new.

    torch.onnx calls a dimension it cannot tell after the value: op type of the
    node, name, ``_dim_`` and the axis, as in
    ``Concatpast_key.0_RetainedState_dim_2``. Others that look alike stay.
    """
    return _derived(symbols, producers, plan.outputs)


def foreign(symbols: frozenset[str], producers: Mapping[str, str], plan: Plan) -> frozenset[str]:
    """The symbols that would count as made of an output's new name, though they are not.

    One may be the very name that another symbol gets; and taking the token out
    again would change any of them.
    """
    outputs = plan.outputs
    news = {outputs.get(name, name): op_type for name, op_type in producers.items()}
    staying = symbols - follow(symbols, producers, plan).keys()
    return frozenset(_derived(staying, news, {new: old for old, new in outputs.items()}))


def _derived(
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


def _end(value: Value, match: Match, rules: Rules, wish: Wish) -> End:
    new = rules.rewrite(match, wish.target, normalize=wish.normalize)
    normal = rules.normal_suffix(match) == match.parts.get("suffix", "")
    return End(value, match.token, new if wish.yields(match.token) else value.name, normal)


def _why_kept(side: str, name: str, rules: Rules) -> str | None:
    reason = rules.kept(name)
    if reason is None and side == "output":
        return UNKNOWN if rules.retains(name) else PLAIN
    return reason
