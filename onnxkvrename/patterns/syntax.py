"""Parse the part of RE2's pattern syntax that needs no installed engine.

Accepted, each with RE2's meaning:

- characters, ``.`` (no newline, unless ``(?s)`` is set), classes such as
  ``[a-z_]`` and ``[^/]``; ``\\d``, ``\\w`` and ``\\s`` with their negations,
  which are ASCII: ``[0-9]``, ``[0-9A-Za-z_]`` and ``[\\t\\n\\f\\r ]``
- escaped punctuation, ``\\a \\f \\n \\r \\t \\v`` and ``\\xHH``
- alternatives, groups ``(...)``, ``(?:...)`` and ``(?P<name>...)``
- ``? * + {n} {n,} {n,m}`` and their lazy forms
- ``^`` and ``$``, the start and the end of the name (``$`` never means "before
  the last newline"), and the flag ``s``

Not accepted: case folding and other flags, ``\\b``, ``\\C``, ``\\pN``,
``[[:alpha:]]`` and other escapes; in a pattern with named groups, repeating what
may be empty, since engines disagree on the groups; and patterns that would be
expensive to build: ``MAX_LENGTH``, ``MAX_GROUPS``, ``MAX_POSITIONS`` and
``MAX_STEPS`` keep that below about 50 ms and 10 MB. What RE2 refuses is not
accepted either: look-around, back-references, ``a**``.

Syntax: https://github.com/google/re2/wiki/Syntax
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import repeat
from typing import NamedTuple, NoReturn

MAX_LENGTH = 4096
"""Characters in the text of a pattern."""
MAX_GROUPS = 32
"""Named groups."""
MAX_POSITIONS = 1000
"""Characters, classes, groups, anchors, empty parts and choices, repetitions unfolded."""
MAX_STEPS = 25_000
"""Pairs of positions of which one can come directly after the other."""
_MAX_DEPTH = 50
_MAX_REPEAT = 1000
_MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = ((0x09, 0x0A), (0x0C, 0x0D), (0x20, 0x20))
_NAMED_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROL_ESCAPES = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_REPEATS: dict[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_OCTAL = tuple("01234567")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint ranges of code points, each with both ends."""


class PatternSyntaxError(ValueError):
    """A pattern that is malformed, or outside of the syntax accepted here.

    Attributes:
        is_malformed: RE2 refuses the pattern, too.
    """

    def __init__(self, message: str, *, is_malformed: bool = False) -> None:
        super().__init__(message)
        self.is_malformed = is_malformed


class Characters(NamedTuple):
    """One character out of some ranges."""

    ranges: Ranges


class Sequence(NamedTuple):
    """Items one after the other; without any it is the empty text."""

    items: tuple[Node, ...]


class Choice(NamedTuple):
    """Alternatives, the preferred one first."""

    options: tuple[Node, ...]


class Repeat(NamedTuple):
    """A body ``least`` to ``most`` times; ``most`` is ``None`` for no limit."""

    body: Node
    least: int
    most: int | None
    greedy: bool


class Group(NamedTuple):
    """A group with a name."""

    name: str
    body: Node


class Anchor(NamedTuple):
    """The start of the name, or its end."""

    is_start: bool


Node = Characters | Sequence | Choice | Repeat | Group | Anchor


class ParsedPattern(NamedTuple):
    """A pattern's tree, its named groups as they open, and its positions and steps together."""

    tree: Node
    groups: tuple[str, ...]
    cost: int


def parse_pattern(text: str) -> ParsedPattern:
    """Parse a pattern.

    Args:
        text: The pattern, in RE2's syntax.

    Raises:
        PatternSyntaxError: The pattern is malformed or not in the accepted syntax.
    """
    if len(text) > MAX_LENGTH:
        raise PatternSyntaxError(f"more than {MAX_LENGTH} characters of text")
    parser = _Parser(text)
    tree = parser.parse_choice(depth=0)
    if parser.index < len(text):
        parser.refuse("unexpected )", is_malformed=True)
    if parser.groups and parser.repeats_empty:
        parser.refuse("a repetition of something that may be empty, in a pattern with named groups")
    if (positions := _count_positions(tree)) > MAX_POSITIONS:
        parser.refuse(f"more than {MAX_POSITIONS} characters and classes, repetitions unfolded")
    if (steps := _measure(tree).steps) > MAX_STEPS:
        parser.refuse(f"more than {MAX_STEPS} ways from one character to the next")
    return ParsedPattern(tree, tuple(parser.groups), positions + steps)


class _Parser:
    """A recursive-descent parser; ``index`` is that of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.index = 0
        self.dot_matches_newline = False
        self.repeats_empty = False
        self.groups: list[str] = []

    def refuse(self, reason: str, *, is_malformed: bool = False) -> NoReturn:
        raise PatternSyntaxError(reason, is_malformed=is_malformed)

    def skip(self, prefix: str) -> bool:
        """Step over `prefix` if it comes next."""
        if not self.text.startswith(prefix, self.index):
            return False
        self.index += len(prefix)
        return True

    def take_character(self, missing: str) -> str:
        if self.index == len(self.text):
            self.refuse(missing, is_malformed=True)
        character = self.text[self.index]
        if "\ud800" <= character <= "\udfff":
            self.refuse("a byte that is not UTF-8", is_malformed=True)
        self.index += 1
        return character

    def parse_choice(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            self.refuse(f"groups nested more than {_MAX_DEPTH} deep")
        options = [self.parse_sequence(depth)]
        while self.skip("|"):
            options.append(self.parse_sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def parse_sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self.index < len(self.text) and self.text[self.index] not in "|)":
            atom = self.parse_atom(depth)
            if atom is not None:
                items.append(self.parse_repetition(atom))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def parse_atom(self, depth: int) -> Node | None:
        """Parse a character, a class, an anchor or a group; `None` for a flag."""
        character = self.take_character("")
        if character == "(":
            return self.parse_group(depth)
        if character == "[":
            return Characters(self.parse_class())
        if character == "\\":
            return Characters(self.parse_escape())
        if character == ".":
            return Characters(_complement(() if self.dot_matches_newline else ((10, 10),)))
        if character in "^$":
            return Anchor(character == "^")
        if character in "*+?":
            self.refuse(f"no argument for repetition operator: {character}", is_malformed=True)
        if character == "{":
            self.refuse("an unescaped {")
        return Characters(((ord(character), ord(character)),))

    def parse_group(self, depth: int) -> Node | None:
        outer_flag, name = self.dot_matches_newline, ""
        if self.skip("?P<"):
            name = self.parse_group_name()
        elif self.skip("?s)") or self.skip("?-s)"):
            self.dot_matches_newline = self.text[self.index - 3] == "?"
            if self.text[self.index : self.index + 1] in ("*", "+", "?", "{"):
                self.refuse("a repetition of a flag")
            return None
        elif self.skip("?s:") or self.skip("?-s:"):
            self.dot_matches_newline = self.text[self.index - 3] == "?"
        elif self.text.startswith(("?=", "?!", "?<=", "?<!"), self.index):
            operator = f"({self.text[self.index : self.index + 2]}"
            self.refuse(f"invalid perl operator: {operator}", is_malformed=True)
        elif self.text.startswith("?", self.index) and not self.skip("?:"):
            self.refuse(f"({self.text[self.index : self.index + 2]}")
        body = self.parse_choice(depth + 1)
        if not self.skip(")"):
            self.refuse("missing )", is_malformed=True)
        self.dot_matches_newline = outer_flag
        return Group(name, body) if name else Sequence((body,))

    def parse_group_name(self) -> str:
        name, closed, _ = self.text[self.index :].partition(">")
        if not closed or not name.isascii() or not name.replace("_", "a").isalnum():
            self.refuse(f"the group name {name}" if closed else "a group name without >")
        if name in self.groups:
            self.refuse(f"two groups with the name {name}")
        if len(self.groups) == MAX_GROUPS:
            self.refuse(f"more than {MAX_GROUPS} named groups")
        self.groups.append(name)
        self.index += len(name) + 1
        return name

    def parse_repetition(self, atom: Node) -> Node:
        bounds = self.parse_bounds()
        if bounds is None:
            return atom
        if isinstance(atom, Anchor):
            self.refuse("a repetition of ^ or $")
        greedy = not self.skip("?")
        following = self.text[self.index : self.index + 1]
        if following in ("*", "+", "?"):
            self.refuse(f"bad repetition operator: {following}", is_malformed=True)
        if following == "{":
            self.refuse("a repetition of a repetition")
        if bounds != (0, 1) and _may_be_empty(atom):
            self.repeats_empty = True
        if _count_repeats(atom) * max(bounds[1] or 0, bounds[0], 1) > _MAX_REPEAT:
            self.refuse(f"a repetition of more than {_MAX_REPEAT} times")
        return Repeat(atom, *bounds, greedy)

    def parse_bounds(self) -> tuple[int, int | None] | None:
        if self.text[self.index : self.index + 1] in _REPEATS:
            self.index += 1
            return _REPEATS[self.text[self.index - 1]]
        if not self.skip("{"):
            return None
        text, closed, _ = self.text[self.index :].partition("}")
        least, comma, most = text.partition(",")
        numbers = [least, most] if most else [least]
        if not closed or any(not n.isascii() or not n.isdigit() or len(n) > 4 for n in numbers):
            self.refuse("an unescaped {")
        self.index += len(text) + 1
        if max(map(int, numbers)) > _MAX_REPEAT or (most and int(most) < int(least)):
            self.refuse(f"invalid repetition size: {{{text}}}", is_malformed=True)
        return int(least), None if comma and not most else int(most or least)

    def parse_escape(self) -> Ranges:
        character = self.take_character("trailing \\")
        if character.lower() in _NAMED_CLASSES:
            ranges = _NAMED_CLASSES[character.lower()]
            return ranges if character.islower() else _complement(ranges)
        if character == "x":
            digits = self.text[self.index : self.index + 2]
            if len(digits) < 2 or not _HEX_DIGITS.issuperset(digits):
                self.refuse("an escape \\x without two hexadecimal digits")
            self.index += 2
            return ((int(digits, 16), int(digits, 16)),)
        code = _CONTROL_ESCAPES.get(character)
        if code is None:
            if character in "123456789" and self.text[self.index : self.index + 1] not in _OCTAL:
                self.refuse(f"invalid escape sequence: \\{character}", is_malformed=True)
            if not character.isascii() or character.isalnum() or character == "_":
                self.refuse(f"the escape \\{character}")
            code = ord(character)
        return ((code, code),)

    def parse_class(self) -> Ranges:
        negated = self.skip("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or not self.text.startswith("]", self.index):
            ranges += self.parse_class_item(first)
            first = False
        self.index += 1
        return _complement(ranges) if negated else _merge(ranges)

    def parse_class_item(self, first: bool) -> Ranges:
        if self.text.startswith(("[:", "[.", "[="), self.index):
            self.refuse("a class such as [:alpha:]")
        if self.text.startswith("-", self.index):
            if not first and not self.text.startswith("-]", self.index):
                self.refuse("an unescaped - inside a class")
            self.index += 1
            if first and self.text.startswith("-", self.index):
                self.refuse("an unescaped - inside a class")
            return ((0x2D, 0x2D),)
        low = self.parse_class_character()
        if not self.text.startswith("-", self.index) or self.text.startswith("-]", self.index):
            return low
        self.index += 1
        high = self.parse_class_character()
        if any(len(side) > 1 or side[0][0] != side[0][1] for side in (low, high)):
            self.refuse("a range between classes")
        if low[0][0] > high[0][0]:
            self.refuse("invalid character class range", is_malformed=True)
        return _merge([(low[0][0], high[0][0])])

    def parse_class_character(self) -> Ranges:
        character = self.take_character("missing ]")
        if character == "\\":
            return self.parse_escape()
        return ((ord(character), ord(character)),)


def _merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges, join those that touch, and leave surrogates out."""
    return _complement(_complement(ranges))


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all characters of Unicode (surrogates are none) that are in no range."""
    free, start = [], 0
    for low, high in sorted((*ranges, _SURROGATES)):
        if low > start:
            free.append((start, low - 1))
        start = max(start, high + 1)
    if start <= _MAX_CODE_POINT:
        free.append((start, _MAX_CODE_POINT))
    return tuple(free)


def _may_be_empty(node: Node) -> bool:
    if isinstance(node, Characters):
        return False
    if isinstance(node, Repeat):
        return node.least == 0 or _may_be_empty(node.body)
    if isinstance(node, Group):
        return _may_be_empty(node.body)
    if isinstance(node, Choice):
        return any(map(_may_be_empty, node.options))
    return isinstance(node, Anchor) or all(map(_may_be_empty, node.items))


def _count_positions(node: Node) -> int:
    """Return how many positions there are once repetitions are unfolded.

    Each part that needs work to build counts as a position, even if it reads no character.
    """
    if isinstance(node, Repeat):
        body = _count_positions(node.body)
        if node.most is None:
            return body * max(node.least, 1) + 1
        return max(body * node.most + node.most - node.least, 1)
    if isinstance(node, Group):
        return _count_positions(node.body) + 2
    if isinstance(node, Sequence):
        return max(sum(map(_count_positions, node.items)), 1)
    return sum(map(_count_positions, node.options)) + 1 if isinstance(node, Choice) else 1


class _Size(NamedTuple):
    """How many positions a part of a pattern begins and ends with, and how they connect.

    Attributes:
        first: The positions that can come first.
        last: The positions that can come last.
        steps: The pairs of positions of which one can come directly after the other.
        may_be_empty: The part can match the empty text.
    """

    first: int
    last: int
    steps: int
    may_be_empty: bool


_EMPTY = _Size(0, 0, 0, True)
_CHARACTER = _Size(1, 1, 0, False)
_CROSSING = _Size(1, 0, 0, True)
"""A part that reads no character: an anchor, a border of a group, a choice."""


def _measure(node: Node) -> _Size:
    """Return the size of a part of a pattern, in time linear in its positions."""
    if isinstance(node, Repeat):
        return _measure_repeat(node)
    if isinstance(node, Group):
        return reduce(_join, (_CROSSING, _measure(node.body), _CROSSING))
    if isinstance(node, Sequence):
        return reduce(_join, map(_measure, node.items), _EMPTY)
    if isinstance(node, Choice):
        first, last, steps, may_be_empty = zip(*map(_measure, node.options), strict=True)
        targets = sum(max(count, 1) for count in first)
        return _join(_CROSSING, _Size(targets, sum(last), sum(steps), any(may_be_empty)))
    return _CHARACTER if isinstance(node, Characters) else _CROSSING


def _measure_repeat(node: Repeat) -> _Size:
    body = _measure(node.body)
    if node.most is None:
        loop = _join(body, _CROSSING) if node.least else _join(_CROSSING, body)
        loop = loop._replace(
            steps=loop.steps + loop.first * loop.last,
            may_be_empty=node.least == 0 or body.may_be_empty,
        )
        required = reduce(_join, repeat(body, max(node.least - 1, 0)), _EMPTY)
        return _join(required, loop)
    required = reduce(_join, repeat(body, node.least), _EMPTY)
    optional = _join(_CROSSING, body)._replace(may_be_empty=True)
    return reduce(_join, repeat(optional, node.most - node.least), required)


def _join(left: _Size, right: _Size) -> _Size:
    """Return the size of one part followed by another."""
    return _Size(
        left.first + (right.first if left.may_be_empty else 0),
        right.last + (left.last if right.may_be_empty else 0),
        left.steps + right.steps + left.last * right.first,
        left.may_be_empty and right.may_be_empty,
    )


def _count_repeats(node: Node) -> int:
    """Return how often the innermost of nested counted repetitions is unfolded, at most."""
    if isinstance(node, Repeat):
        return _count_repeats(node.body) * max(node.most or 0, node.least, 1)
    if isinstance(node, Group):
        return _count_repeats(node.body)
    inner = node.items if isinstance(node, Sequence) else ()
    inner = node.options if isinstance(node, Choice) else inner
    return max(map(_count_repeats, inner), default=1)
