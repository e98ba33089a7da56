"""Find what the names of caches have in common: a number for the layer, a word for the part.

Such names become one pattern, which holds for the next model of their exporter. Others are listed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.rules.profile import ROLES

_NUMBER = re.compile("(?<![0-9])(0|[1-9][0-9]{0,5})(?![0-9])")
_WORD = re.compile("[A-Za-z0-9]+")
_PHRASE = re.compile("[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*")
_LAYER = "\0"
"""The place of the layer's number in names of a series."""
_WORDS_OF_PART = 3
"""The most words of a part, as in ``encoder.key_scale``."""
_MOST_PATTERNS, _MOST_PARTS = 64, 16
"""The most patterns, and parts of one: each is tried on every name."""
_COMPARED_WORDS = 16
"""The most words of names in which such a word is looked for: each may be the part."""
_ROLE_WORDS = {
    **dict.fromkeys(("k", "key", "keys"), "key"),
    **dict.fromkeys(("v", "val", "value", "values"), "value"),
}
_ALIKE = frozenset({"attention", "linear"})
"""Kinds that may share their names, as shapes tell which one a layer has."""
_PLACED = frozenset({"delta", "once"})
"""Updates that rules must say, as the shapes of both sides differ, or nothing is written."""


class Nature(NamedTuple):
    """What rules say of caches beside their names.

    Attributes:
        kind: The kind of buffer, such as ``attention``.
        update: How it is updated; empty if that is not known.
        is_open: Whether some are of another kind, which their shapes tell.
        is_alone: Whether a model has the outputs alone.
    """

    kind: str
    update: str
    is_open: bool = False
    is_alone: bool = False


class StateNames(NamedTuple):
    """The names of a pair.

    Attributes:
        input: The name of the input.
        output: The name of the output.
        suffixes: What follows a token in each of them.
        nature: What it is.
        is_quantized: Whether it holds integers, which scales belong to.
        is_stack: Whether it holds keys and values, one after the other.
        models: The models that have it, by their numbers.
    """

    input: str
    output: str
    suffixes: tuple[str, str]
    nature: Nature
    is_quantized: bool = False
    is_stack: bool = False
    models: frozenset[int] = frozenset()

    @property
    def stems(self) -> tuple[str, str]:
        """What a token follows in each name."""
        before, after = self.suffixes
        return self.input.removesuffix(before), self.output.removesuffix(after)

    def add_token(self, token: str) -> tuple[str, str]:
        """Return both names with a token."""
        (stem, output), (before, after) = self.stems, self.suffixes
        return f"{stem}_{token}{before}", f"{output}_{token}{after}"


class PlacedState(NamedTuple):
    """A pair with a part and a layer, which its names suggest."""

    names: StateNames
    part: str
    layer: int


class KvTable(NamedTuple):
    """A table ``[[kv]]`` of rules.

    Attributes:
        input: The pattern of the inputs.
        output: The pattern of the outputs.
        nature: What its caches are.
        states: Its caches, each with its part and its layer.
        is_pattern: Whether it holds for other layers as well.
        roles: The parts that the names call otherwise, by their roles.
    """

    input: str
    output: str
    nature: Nature
    states: tuple[PlacedState, ...]
    is_pattern: bool = False
    roles: Mapping[str, str] = MappingProxyType({})

    @property
    def parts(self) -> tuple[str, ...]:
        """Its parts, in their order."""
        return tuple(dict.fromkeys(state.part for state in self.states))


class _Series(NamedTuple):
    """Caches whose names differ by the number of their layer only.

    Attributes:
        input: What a token follows in the inputs' names, with `_LAYER` in the place of the number.
        output: The same of the outputs' names.
        suffixes: What follows a token on both sides.
        nature: What they are.
        states: The caches by layer.
    """

    input: str
    output: str
    suffixes: tuple[str, str]
    nature: Nature
    states: Mapping[int, StateNames]

    @property
    def layers(self) -> frozenset[tuple[int, frozenset[int]]]:
        """Its layers, each with the models that have it."""
        return frozenset((layer, state.models) for layer, state in self.states.items())


class _Place(NamedTuple):
    """Where the names of some series differ: what is before and after that, on each side."""

    input: tuple[str, str]
    output: tuple[str, str]
    suffixes: tuple[str, str]


def join_natures(natures: Iterable[Nature]) -> Nature | None:
    """Return what rules for several caches say; ``None`` if these need rules of their own."""
    kinds, updates, are_open, are_alone = map(dict.fromkeys, zip(*natures, strict=True))
    if len(kinds) > 1 and not _ALIKE.issuperset(kinds):
        return None
    if len(updates) > 1 and not _PLACED.isdisjoint(updates):
        return None
    kind, update = (next(iter(each)) if len(each) == 1 else "" for each in (kinds, updates))
    return Nature(kind or "attention", update, not kind or any(are_open), any(are_alone))


def build_tables(states: Sequence[StateNames], listed: Collection[str]) -> list[KvTable]:
    """Return the tables for some caches, in their order.

    Args:
        states: The caches.
        listed: The inputs of those that get tables of their own, whatever their names are.
    """
    series = [*_find_series([state for state in states if state.input not in listed])]
    tables = [*_build_patterns(series)]
    if len(tables) > _MOST_PATTERNS:
        tables = []
    parts = {part for table in tables for part in table.parts}
    named = {state.names.input for table in tables for state in table.states}
    rest = [state for state in states if state.input not in named]
    for placed in _place_states(rest, parts):
        names = placed.names
        input_pattern, output_pattern = (
            f"{re.escape(stem)}{{token}}{re.escape(suffix)}"
            for stem, suffix in zip(names.stems, names.suffixes, strict=True)
        )
        tables.append(KvTable(input_pattern, output_pattern, names.nature, (placed,)))
    order = {state.input: number for number, state in enumerate(states)}
    tables.sort(key=lambda table: min(order[state.names.input] for state in table.states))
    return tables


def _find_series(states: Iterable[StateNames]) -> Iterator[_Series]:
    """Yield the series of caches; what has no layer in both names is in none."""
    groups: dict[tuple[str, ...], list[StateNames]] = {}
    for state in states:
        if _LAYER not in state.input + state.output:
            names = (_NUMBER.sub("0", stem) for stem in state.stems)
            groups.setdefault((*names, *state.suffixes), []).append(state)
    for alike in groups.values():
        inputs = [_NUMBER.split(state.stems[0]) for state in alike]
        outputs = [_NUMBER.split(state.stems[1]) for state in alike]
        at = _find_layer_number(inputs, outputs)
        if at is None:
            continue
        same = [
            place
            for place in range(1, len(outputs[0]), 2)
            if all(made[place] == given[at] for given, made in zip(inputs, outputs, strict=True))
        ]
        if not same:
            continue
        output_at = at if at in same else same[0]
        series: dict[tuple[str, str, tuple[str, str]], dict[int, StateNames]] = {}
        for state, given, made in zip(alike, inputs, outputs, strict=True):
            layer, given[at], made[output_at] = int(given[at]), _LAYER, _LAYER
            key = "".join(given), "".join(made), state.suffixes
            series.setdefault(key, {})[layer] = state
        for key, by_layer in series.items():
            nature = join_natures(state.nature for state in by_layer.values())
            if nature is not None:
                yield _Series(*key, nature, by_layer)


def _build_patterns(series: Sequence[_Series]) -> Iterator[KvTable]:
    """Yield a table for all series that differ by a word in one place, or for one of them."""
    used_parts: set[str] = set()
    used_roles: dict[tuple[str, str], set[int]] = {}
    left = dict.fromkeys(range(len(series)))
    for place, words in _find_places(series):
        alike = {word: series[number] for number, word in words.items() if number in left}
        if not 1 < len(alike) <= _MOST_PARTS or not used_parts.isdisjoint(alike):
            continue
        used_parts.update(alike)
        for number in words:
            left.pop(number, None)
        yield _build_pattern(place, alike, used_roles)
    for each in (series[number] for number in left):
        name = _make_part_name(each.input.split(_LAYER))
        part = next(each for each in _number_name(name) if each not in used_parts)
        used_parts.add(part)
        place = _Place((each.input, ""), (each.output, ""), each.suffixes)
        yield _build_pattern(place, {part: each}, used_roles)


def _find_places(series: Sequence[_Series]) -> list[tuple[_Place, dict[int, str]]]:
    """Return the places where series differ by a word, with the words: most series first.

    Of as many, those come first whose words are roles, then those with the shortest words.
    """
    places: dict[tuple[object, ...], tuple[_Place, dict[int, str]]] = {}
    for number, each in enumerate(series):
        words = [match.span() for match in _WORD.finditer(each.input)]
        for first, (start, _) in enumerate(words if len(words) <= _COMPARED_WORDS else ()):
            for _, end in words[first : first + _WORDS_OF_PART]:
                word = each.input[start:end]
                for rest in _list_rests(each.output, word):
                    place = _Place((each.input[:start], each.input[end:]), rest, each.suffixes)
                    key = (place, each.nature, each.layers)
                    places.setdefault(key, (place, {}))[1][number] = word
    found = [(place, words) for place, words in places.values() if len(words) > 1]

    def rate(words: Collection[str]) -> tuple[int, bool, int]:
        return -len(words), not {*words}.issubset(ROLES), sum(map(len, words))

    return sorted(found, key=lambda item: rate(item[1].values()))


def _list_rests(name: str, word: str) -> Iterator[tuple[str, str]]:
    """Yield what is before and after a word in a name, wherever it has that."""
    if not _PHRASE.fullmatch(word):
        return
    for match in re.finditer(f"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", name):
        yield name[: match.start()], name[match.end() :]


def _build_pattern(
    place: _Place, series: Mapping[str, _Series], used_roles: dict[tuple[str, str], set[int]]
) -> KvTable:
    """Return the table for series by their parts, which are in its patterns if there are several.

    `used_roles` are the roles in other tables, each with its layers.
    """
    parts, first = [*series], next(iter(series.values()))
    if any(part.startswith(shorter) for shorter, part in pairwise(sorted(parts))):
        parts.sort(key=len, reverse=True)  # the first one that fits counts
    group = f"(?P<part>{'|'.join(map(re.escape, parts))})" if len(parts) > 1 else ""
    states = [
        PlacedState(series[part].states[layer], part, layer)
        for layer in first.states
        for part in parts
    ]
    return KvTable(
        _write_pattern(place.input, group, place.suffixes[0]),
        _write_pattern(place.output, group, place.suffixes[1]),
        first.nature,
        tuple(states),
        is_pattern=True,
        roles=_find_roles(states, first.nature, used_roles),
    )


def _write_pattern(sides: tuple[str, str], group: str, suffix: str) -> str:
    """Return the pattern of names with a group between two texts, and a token after them."""
    before, after = ("{layer}".join(map(re.escape, side.split(_LAYER))) for side in sides)
    return f"{before}{group}{after}{{token}}{re.escape(suffix)}"


def _find_roles(
    states: Iterable[PlacedState], nature: Nature, used: dict[tuple[str, str], set[int]]
) -> dict[str, str]:
    """Return the parts by their roles, where names say another word and no other part has it."""
    parts: dict[str, dict[str, set[int]]] = {}
    for names, part, layer in states if nature.kind in ("attention", "cross") else ():
        last = _WORD.findall(part)[-1:] or [part]
        role = "key_value" if names.is_stack else _ROLE_WORDS.get(last[0].lower(), part)
        if role in ROLES:
            parts.setdefault(role, {}).setdefault(part, set()).add(layer)
    roles: dict[str, str] = {}
    for role, layers_by_part in parts.items():
        ((part, layers), *others) = layers_by_part.items()
        layers_of_role = used.setdefault((role, nature.kind), set())
        if not others and layers_of_role.isdisjoint(layers):
            roles |= {role: part} if part != role else {}
            layers_of_role |= layers
    return roles


def _place_states(
    states: Iterable[StateNames], used_parts: Collection[str]
) -> Iterator[PlacedState]:
    """Yield states with their layers and parts: the number that varies most, and what is left.

    Without a number in the inputs that may be a layer, it is one of the outputs.
    """
    known: set[tuple[str, int]] = set()
    natures: dict[str, Nature | None] = dict.fromkeys(used_parts)
    groups: dict[str, list[StateNames]] = {}
    for state in states:
        groups.setdefault(_NUMBER.sub("0", state.input), []).append(state)
    for alike in groups.values():
        names = inputs = [_NUMBER.split(state.input) for state in alike]
        outputs = [_NUMBER.split(state.output) for state in alike]
        layer_at = _find_layer_number(inputs, outputs)
        if layer_at is None and len({_NUMBER.sub("0", state.output) for state in alike}) == 1:
            layer_at = _find_layer_number(outputs, ())
            names = inputs if layer_at is None else outputs
        for state, texts in zip(alike, names, strict=True):
            layer = 0 if layer_at is None else int(texts[layer_at])
            name = _make_part_name(text for at, text in enumerate(texts) if at != layer_at)
            part = next(
                each
                for each in _number_name(name)
                if (each, layer) not in known
                and natures.setdefault(each, state.nature) == state.nature  # one for each part
            )
            known.add((part, layer))
            yield PlacedState(state, part, layer)


def _find_layer_number(
    names: Sequence[Sequence[str]], others: Sequence[Sequence[str]]
) -> int | None:
    """Return which number of names that differ in numbers alone is the layer, by its position.

    The number of a value, as exporters give one to what has no name, is none: a layer has several
    parts, or is in the other names as well, or layers are counted from 0. Of several, the one that
    varies most counts, then one that is not a part of a word.

    Args:
        names: The names, divided into texts and numbers.
        others: The names of the other sides, divided likewise; none if they do not count.
    """

    def may_be_layer(at: int) -> bool:
        numbers = [texts[at] for texts in names]
        is_in_others = bool(others) and all(
            number in other[1::2] for number, other in zip(numbers, others, strict=True)
        )
        counts = {*Counter(numbers).values()}
        is_counted = {*map(int, numbers)} == {*range(len({*numbers}))}
        return is_in_others or is_counted or (len(counts) == 1 and min(counts) > 1)

    def rate(at: int) -> tuple[int, bool, int]:
        is_in_word = names[0][at - 1][-1:].isalpha()
        return len({texts[at] for texts in names}), not is_in_word, -at

    return max(filter(may_be_layer, range(1, len(names[0]), 2)), key=rate, default=None)


def _make_part_name(texts: Iterable[str]) -> str:
    """Return a name for a part, of what is around the layer."""
    return re.sub("[^0-9A-Za-z]+", "_", "_".join(texts)).strip("_") or "state"


def _number_name(name: str) -> Iterator[str]:
    """Yield a name, and then the same with numbers."""
    yield name
    yield from (f"{name}_{number}" for number in count(2))
