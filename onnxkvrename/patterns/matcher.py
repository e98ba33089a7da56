"""Match whole names against a parsed pattern, in time linear in the name's length.

The pattern becomes an automaton whose states are its *positions*: the characters
and classes, with repetitions unfolded. A name is read twice, and no position of
it more than twice, so there is no backtracking to blow up:

1. From the end to the start, keeping the set of positions from which the rest of
   the name can be matched. If it does not include the start, the name does not match.
2. Only for groups, from the start to the end, taking at each character the most
   preferred position of that set. It cannot lead to a dead end.

Preferences are those of RE2 and of Python's ``re``: the first alternative, the
longest repetition, or the shortest if it is lazy. A byte that is not UTF-8
(a surrogate in the name) is matched by no position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from operator import xor
from typing import NamedTuple

from onnxkvrename.errors import RulesError
from onnxkvrename.patterns.syntax import (
    Anchor,
    Characters,
    Choice,
    Group,
    Node,
    Ranges,
    Repeat,
    parse_pattern,
)

_START, _END = 0, 1
_MAX_SHOWN_LENGTH = 80
_MAX_CACHED = 10_000
"""Transitions that are remembered, which bounds memory for any names."""
_CACHED_BY_LARGE_PATTERN = 1_000
_MAX_STEPS = 1 << 17
"""Steps that a pattern may follow without the help of remembered ones,"""
_STEPS_PER_CHARACTER = 4
"""and as many more for each character of a name. So the time is linear in the names, even where
nothing that was remembered comes up again."""
_LARGE_COST = 200
"""From this cost on a pattern remembers fewer transitions, which are larger."""


class _Step(NamedTuple):
    """A position that can come next, and the borders of groups that are crossed before it.

    A group opens with border ``2 * number`` and closes with ``2 * number + 1``.
    """

    position: int
    borders: tuple[int, ...]


class _Automaton(NamedTuple):
    """An automaton; sets of positions are bits of an integer.

    Position 0 is the start of the name, position 1 its end.

    Attributes:
        steps: For each position the steps that can follow it, preferred ones first.
        predecessors: For each position the set of those that it can follow.
        interval_starts: The first code point of each interval in which all characters are
            matched by the same positions, in ascending order, from 0 on.
        interval_positions: For each interval the set of positions that match its characters.
    """

    steps: tuple[tuple[_Step, ...], ...]
    predecessors: tuple[int, ...]
    interval_starts: tuple[int, ...]
    interval_positions: tuple[int, ...]


class LinearMatcher:
    """A pattern that matches whole names; its automaton is built when it is first used.

    Attributes:
        groups: The named groups, in the order in which they open.
        cost: What the automaton takes to build, in positions and steps between them.

    Raises:
        PatternSyntaxError: The pattern is malformed or not in the accepted syntax.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tree, self.groups, self.cost = parse_pattern(text)
        is_large = self.cost >= _LARGE_COST
        self._max_cached = _CACHED_BY_LARGE_PATTERN if is_large else _MAX_CACHED
        self._automaton: _Automaton | None = None
        self._ascii_positions: dict[str, int] = {}
        self._transitions: dict[tuple[int, int], int] = {}
        self._choices: dict[tuple[int, int], _Step] = {}
        self._steps_left = _MAX_STEPS

    def __reduce__(self) -> tuple[type[LinearMatcher], tuple[str]]:
        return LinearMatcher, (self._text,)

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name.

        Raises:
            RulesError: That would take too long.
        """
        return bool(self._list_viable_sets(name)[-1] & 1)

    def match_groups(self, name: str) -> dict[str, str] | None:
        """Return the text of each named group, empty where it took no part.

        Returns:
            The groups, or `None` if the pattern does not match the whole name.

        Raises:
            RulesError: That would take too long.
        """
        viable_sets = self._list_viable_sets(name)
        if not viable_sets.pop() & 1:
            return None
        borders = [0] * (2 * len(self.groups))
        position, choices, ascii_positions = _START, self._choices, self._ascii_positions
        for index, character in enumerate((*name, "")):
            if character:
                positions = ascii_positions.get(character)
                if positions is None:
                    positions = self._find_positions(character)
                ready = viable_sets.pop() & positions
            else:
                ready = 1 << _END
            step = choices.get((position, ready))
            if step is None:
                step = self._choose_step(position, ready)
            position, crossed = step
            for border in crossed:
                borders[border] = index
        return {
            group: name[borders[2 * number] : borders[2 * number + 1]]
            for number, group in enumerate(self.groups)
        }

    def _list_viable_sets(self, name: str) -> list[int]:
        """Return for each rest of the name the positions after which it can be matched.

        The first set is for the empty rest, the last for the whole name. The list ends
        early, with an empty set, where nothing can match any more.
        """
        automaton, transitions = self._load_automaton(), self._transitions
        ascii_positions = self._ascii_positions
        self._steps_left = min(
            self._steps_left + _STEPS_PER_CHARACTER * len(name), _MAX_STEPS + len(name)
        )
        viable = automaton.predecessors[_END]
        viable_sets = [viable]
        for character in reversed(name):
            positions = ascii_positions.get(character)
            if positions is None:
                positions = self._find_positions(character)
            before = transitions.get((viable, positions))
            if before is None:
                before = self._compute_transition(viable, positions)
            viable_sets.append(before)
            if not before:
                break
            viable = before
        return viable_sets

    def _choose_step(self, position: int, ready: int) -> _Step:
        """Return the preferred step to one of the positions that are ready."""
        following = self._load_automaton().steps[position]
        index = next(i for i, step in enumerate(following) if ready >> step.position & 1)
        step = following[index]
        self._spend_steps(index + 1)
        if len(self._choices) >= self._max_cached:
            self._choices.clear()
        self._choices[position, ready] = step
        return step

    def _compute_transition(self, viable: int, positions: int) -> int:
        """Return the positions before a character that lead to one of those after it.

        All characters that the same positions match share a transition, so that names
        of many different characters need no more transitions than others.
        """
        before, matching = 0, viable & positions
        self._spend_steps(matching.bit_count())
        predecessors = self._load_automaton().predecessors
        while matching:
            before |= predecessors[matching.bit_length() - 1]
            matching ^= 1 << matching.bit_length() - 1
        if len(self._transitions) >= self._max_cached:
            self._transitions.clear()
        self._transitions[viable, positions] = before
        return before

    def _spend_steps(self, count: int) -> None:
        self._steps_left -= count
        if self._steps_left < 0:
            raise RulesError(
                f"the pattern {self._text[:_MAX_SHOWN_LENGTH]!r} needs more than {_MAX_STEPS:,} "
                f"steps plus {_STEPS_PER_CHARACTER} for each character of the names",
                hint="write it with fewer parts that match the same characters",
            )

    def _find_positions(self, character: str) -> int:
        """Return the set of positions that match a character."""
        positions = self._ascii_positions.get(character)
        if positions is None:
            automaton = self._load_automaton()
            interval = bisect_right(automaton.interval_starts, ord(character)) - 1
            positions = automaton.interval_positions[interval]
            if character.isascii():
                self._ascii_positions[character] = positions
        return positions

    def _load_automaton(self) -> _Automaton:
        if self._automaton is None:
            self._automaton = _Builder(self.groups).build(self._tree)
        return self._automaton


class _Instruction(NamedTuple):
    """A node of the pattern's graph; at most one field besides `targets` is set.

    Attributes:
        position: The position that reads a character, or the end.
        border: The border of a group that is crossed.
        anchor: `True` for the start of the name, `False` for its end.
        targets: The instructions that come next, preferred ones first; only a branch has
            several, and a position has none.
    """

    position: int | None
    border: int | None
    anchor: bool | None
    targets: list[int]


class _Builder:
    """Builds an automaton from a tree, from its end to its start."""

    def __init__(self, groups: tuple[str, ...]) -> None:
        self._numbers = {group: number for number, group in enumerate(groups)}
        self._instructions: list[_Instruction] = []
        self._next_by_position: list[int] = [-1, -1]
        self._classes: dict[Ranges, int] = {}

    def build(self, tree: Node) -> _Automaton:
        self._next_by_position[_START] = self._emit(tree, self._add(position=_END))
        steps = tuple(
            () if position == _END else tuple(self._list_steps(target, position == _START))
            for position, target in enumerate(self._next_by_position)
        )
        predecessors = [0] * len(steps)
        for position, following in enumerate(steps):
            for step in following:
                predecessors[step.position] |= 1 << position
        return _Automaton(steps, tuple(predecessors), *_split_into_intervals(self._classes))

    def _add(
        self,
        *targets: int,
        position: int | None = None,
        border: int | None = None,
        anchor: bool | None = None,
    ) -> int:
        self._instructions.append(_Instruction(position, border, anchor, list(targets)))
        return len(self._instructions) - 1

    def _emit(self, node: Node, target: int) -> int:
        """Add instructions for a node that continue at `target`; return the first of them."""
        if isinstance(node, Characters):
            position = len(self._next_by_position)
            self._next_by_position.append(target)
            self._classes[node.ranges] = self._classes.get(node.ranges, 0) | 1 << position
            return self._add(position=position)
        if isinstance(node, Anchor):
            return self._add(target, anchor=node.is_start)
        if isinstance(node, Group):
            border = 2 * self._numbers[node.name]
            inner = self._emit(node.body, self._add(target, border=border + 1))
            return self._add(inner, border=border)
        if isinstance(node, Choice):
            return self._add(*[self._emit(option, target) for option in node.options])
        if isinstance(node, Repeat):
            return self._emit_repeat(node, target)
        for item in reversed(node.items):
            target = self._emit(item, target)
        return target

    def _emit_repeat(self, node: Repeat, target: int) -> int:
        first, copies = target, node.least
        if node.most is None:
            loop = self._add()
            body = self._emit(node.body, loop)
            self._instructions[loop].targets.extend(_order(body, target, node.greedy))
            first, copies = (body, copies - 1) if copies else (loop, 0)
        else:
            for _ in range(node.most - node.least):
                body = self._emit(node.body, first)
                first = self._add(*_order(body, target, node.greedy))
        for _ in range(copies):
            first = self._emit(node.body, first)
        return first

    def _list_steps(self, first: int, at_start: bool) -> Iterator[_Step]:
        """Yield the positions that can be reached without reading, preferred ones first.

        Of several ways to a position only the preferred one counts.
        """
        pending: list[tuple[int, tuple[int, ...], bool]] = [(first, (), False)]
        seen: set[tuple[int, bool]] = set()
        while pending:
            index, borders, at_end = pending.pop()
            if (index, at_end) in seen:
                continue
            seen.add((index, at_end))
            instruction = self._instructions[index]
            if instruction.position is not None:
                if instruction.position == _END or not at_end:
                    yield _Step(instruction.position, borders)
                continue
            if instruction.anchor is True and not at_start:
                continue
            if instruction.border is not None:
                borders = (*borders, instruction.border)
            at_end = at_end or instruction.anchor is False
            pending += [(target, borders, at_end) for target in reversed(instruction.targets)]


def _split_into_intervals(classes: dict[Ranges, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the starts of all intervals, and the positions that match in each.

    Args:
        classes: The set of positions of each class. No two classes share a position.
    """
    changes = {0: 0}
    for ranges, positions in classes.items():
        for low, high in ranges:
            changes[low] = changes.get(low, 0) ^ positions
            changes[high + 1] = changes.get(high + 1, 0) ^ positions
    starts = tuple(sorted(changes))
    return starts, tuple(accumulate((changes[start] for start in starts), xor))


def _order(body: int, target: int, greedy: bool) -> tuple[int, int]:
    return (body, target) if greedy else (target, body)
