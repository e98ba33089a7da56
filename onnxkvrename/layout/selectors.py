"""Expressions that select exactly the KV buffers of a model, proved against its names.

They are anchored, and mean the same to RE2 and to Python's ``re``. Layers are told
by their numbers: of ``past_key.3.*`` one cannot know whether ``past_key.34`` is meant.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.layout.layout import Layout
from onnxkvrename.rules.patterns import compile_pattern

SelectorSide = Literal["both", "inputs", "outputs"]
SIDES: tuple[SelectorSide, ...] = ("both", "inputs", "outputs")
_SPECIAL_CHARACTERS = frozenset(r"\.^$*+?()[]{}|")
_NUMBER_PATTERN = re.compile("[0-9]+", re.ASCII)


class Selector(NamedTuple):
    """An expression for the names of all buffers of a kind, on one side or both.

    ``kind`` is ``all`` for every kind; ``names`` counts the names that it fits.
    """

    kind: str
    side: SelectorSide
    expression: str
    names: int


class _NameTemplate(NamedTuple):
    """What stands before and behind the number of the layer; no number, no ``after``."""

    prefix: str
    suffix: str | None


def build_selectors(layout: Layout) -> tuple[Selector, ...]:
    """Expressions for all buffers and for each kind, each for both sides, inputs and outputs.

    Each fits all names that it is meant for, and no other input or output of the
    graph. Raises :class:`ModelError` for names of which that cannot be had.
    """
    everything = [value.name for value in (*layout.inputs, *layout.outputs)]
    found = []
    kinds = dict.fromkeys(buffer.kind for buffer in layout.buffers)
    for kind in ("all", *kinds) if kinds else ():
        buffers = [buffer for buffer in layout.buffers if kind in ("all", buffer.kind)]
        for side in SIDES:
            names: dict[str, int] = {}
            for buffer in buffers:
                if side != "outputs" and buffer.input is not None:
                    names[buffer.input] = buffer.layer
                if side != "inputs" and buffer.output is not None:
                    names[buffer.output] = buffer.layer
            if names:
                text = build_name_expression(names.items())
                _check_expression(text, names, everything)
                found.append(Selector(kind, side, text, len(names)))
    return tuple(found)


def build_name_expression(names: Iterable[tuple[str, int]]) -> str:
    """An anchored expression for exactly these names, each with the layer it is of.

    Raises :class:`ModelError` for a name that no expression can spell.
    """
    templates: dict[_NameTemplate, set[int]] = {}
    for template, layer in _choose_templates(tuple(names)):
        templates.setdefault(template, set()).add(layer)
    heads: dict[tuple[str | None, frozenset[int]], list[str]] = {}
    for (before, after), layers in templates.items():
        # Without a number in it a name is the same for whatever layer.
        key = frozenset(layers) if after is not None else frozenset()
        heads.setdefault((after, key), []).append(before)
    tails: dict[tuple[tuple[str, ...], frozenset[int]], list[str | None]] = {}
    for (after, numbered), befores in heads.items():
        tails.setdefault((tuple(sorted(befores)), numbered), []).append(after)
    terms = [
        _build_layer_term(befores, layers, afters) for (befores, layers), afters in tails.items()
    ]
    return f"^(?:{'|'.join(terms)})$" if len(terms) > 1 else f"^{terms[0]}$"


def build_number_expression(values: Collection[int]) -> str:
    """An expression for exactly these numbers, in decimal and without leading zeros."""
    by_length: dict[int, set[str]] = {}
    for value in values:
        by_length.setdefault(len(str(value)), set()).add(str(value))
    found = (_build_digit_terms(frozenset(texts)) for _, texts in sorted(by_length.items()))
    return _join_alternatives([term for terms in found for term in terms])


def _build_digit_terms(texts: frozenset[str]) -> list[str]:
    """Expressions for exactly these strings of digits, all of one length."""
    if texts == {""}:
        return [""]
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    firsts: dict[frozenset[str], list[int]] = {}
    for first, rest in sorted(rests.items()):
        firsts.setdefault(frozenset(rest), []).append(int(first))
    return [
        _format_digit_class(digits) + _join_alternatives(_build_digit_terms(rest))
        for rest, digits in firsts.items()
    ]


def _format_digit_class(digits: Sequence[int]) -> str:
    """A digit, or a class of them with its ranges."""
    if len(digits) == 1:
        return str(digits[0])
    text, start = "", 0
    for at in range(1, len(digits) + 1):
        if at == len(digits) or digits[at] != digits[at - 1] + 1:
            run = digits[start:at]
            text += f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(map(str, run))
            start = at
    return f"[{text}]"


def _join_alternatives(terms: Sequence[str]) -> str:
    return terms[0] if len(terms) == 1 else f"(?:{'|'.join(terms)})"


def _build_layer_term(
    befores: Sequence[str], layers: frozenset[int], afters: Sequence[str | None]
) -> str:
    text = _build_string_expression(befores)
    rest = [after for after in afters if after is not None]
    return text + build_number_expression(layers) + _build_string_expression(rest) if rest else text


def _build_string_expression(texts: Sequence[str]) -> str:
    """An expression for exactly these strings; what they have in common stands once."""
    head = _find_common_prefix(texts)
    rests = [text[len(head) :] for text in texts]
    tail = _find_common_prefix([text[::-1] for text in rests])[::-1]
    middles = sorted({text[: len(text) - len(tail)] for text in rests})
    optional = "?" if middles[0] == "" and len(middles) > 1 else ""
    shown = [_escape_text(text) for text in middles if text]
    middle = f"(?:{'|'.join(shown)}){optional}" if len(middles) > 1 else "".join(shown)
    return _escape_text(head) + middle + _escape_text(tail)


def _find_common_prefix(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    first, last = min(texts), max(texts)
    same = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(same, min(len(first), len(last)))]


def _escape_text(text: str) -> str:
    """Text as an expression that fits just it, printable whatever it holds."""
    return "".join(map(_escape_character, text))


def _escape_character(char: str) -> str:
    if char in _SPECIAL_CHARACTERS:
        return f"\\{char}"
    if char.isprintable():
        return char
    if ord(char) < 0x100:
        return f"\\x{ord(char):02x}"
    raise ModelError(
        f"a name of a KV buffer holds U+{ord(char):04X}, which no expression can spell for all",
        hint="rename that buffer first",
    )


def _choose_templates(names: Sequence[tuple[str, int]]) -> Iterator[tuple[_NameTemplate, int]]:
    """Each name as a template and its layer; the template that fits most of them counts."""
    possible = [list(_list_templates(name, layer)) for name, layer in names]
    common = Counter(template for found in possible for template in found)
    for (name, layer), found in zip(names, possible, strict=True):
        best = max(found, key=lambda template: common[template], default=_NameTemplate(name, None))
        yield best, layer


def _list_templates(name: str, layer: int) -> Iterator[_NameTemplate]:
    """The templates that a name may be of: one for each place where its layer stands."""
    for found in _NUMBER_PATTERN.finditer(name):
        if found[0] == str(layer):
            yield _NameTemplate(name[: found.start()], name[found.end() :])


def _check_expression(text: str, wanted: Collection[str], names: Iterable[str]) -> None:
    """Raise :class:`ModelError` if an expression does not fit the wanted names and no others."""
    try:
        pattern, python = compile_pattern(text), re.compile(text)
    except (ValueError, re.error) as error:
        raise ModelError(f"no expression selects its KV buffers: {error}") from None
    for name in names:
        meant = name in wanted
        if pattern.matches(name) is not meant or (python.search(name) is not None) is not meant:
            raise ModelError(
                f"no expression selects its KV buffers and nothing else: it fails for {name}",
                hint="rename that value first",
            )
