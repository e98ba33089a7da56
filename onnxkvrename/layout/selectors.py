"""Build expressions that select exactly the KV buffers of a model, and prove them on its names.

The expressions are anchored, and use only what RE2 and Python's ``re`` read alike. They list the
numbers of the layers: ``past_key.3.*`` would also match ``past_key.34``.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.rules.patterns import compile_pattern

SelectorSide = Literal["both", "inputs", "outputs"]
SIDES: tuple[SelectorSide, ...] = ("both", "inputs", "outputs")
_SPECIAL_CHARACTERS = frozenset(r"\.^$*+?()[]{}|")
_MAX_TEMPLATES = 16
"""Templates of one name that are considered; each is as long as the name."""
_NUMBER_PATTERN = re.compile("[0-9]+", re.ASCII)


class Selector(NamedTuple):
    """An expression for the names of all buffers of a kind.

    Attributes:
        kind: The kind of the buffers, ``all`` for every kind.
        side: The names that it matches: inputs, outputs, or both.
        expression: The regular expression.
        names: The number of names that it matches.
    """

    kind: str
    side: SelectorSide
    expression: str
    names: int


class _NameTemplate(NamedTuple):
    """The text before and after the number of the layer; no `suffix` without a number."""

    prefix: str
    suffix: str | None


def build_selectors(layout: Layout) -> tuple[Selector, ...]:
    """Return expressions for all buffers and for each kind, each for every side.

    Every expression matches all names that it is for, and no other input or output.

    Raises:
        ModelError: No expression selects exactly these names.
    """
    value_names = [value.name for value in (*layout.inputs, *layout.outputs)]
    selectors = []
    kinds = dict.fromkeys(buffer.kind for buffer in layout.buffers)
    for kind in ("all", *kinds) if kinds else ():
        buffers = [buffer for buffer in layout.buffers if kind in ("all", buffer.kind)]
        for side in SIDES:
            names = _collect_names(buffers, side)
            if names:
                expression = build_name_expression(names.items())
                _check_expression(expression, names, value_names)
                selectors.append(Selector(kind, side, expression, len(names)))
    return tuple(selectors)


def _collect_names(buffers: Iterable[KvBuffer], side: SelectorSide) -> dict[str, int]:
    """Return the names of buffers on a side, each with its layer."""
    names: dict[str, int] = {}
    for buffer in buffers:
        if side != "outputs" and buffer.input is not None:
            names[buffer.input] = buffer.layer
        if side != "inputs" and buffer.output is not None:
            names[buffer.output] = buffer.layer
    return names


def build_name_expression(names: Iterable[tuple[str, int]]) -> str:
    """Return an anchored expression for exactly these names.

    Args:
        names: The names, each with its layer.

    Raises:
        ModelError: A name has a character that RE2 and ``re`` do not write in the same way.
    """
    layers_by_template: dict[_NameTemplate, set[int]] = {}
    for template, layer in _choose_templates(tuple(names)):
        layers_by_template.setdefault(template, set()).add(layer)
    prefixes: dict[tuple[str | None, frozenset[int]], list[str]] = {}
    for (prefix, suffix), layers in layers_by_template.items():
        # A name without a number in it does not depend on the layer.
        numbers = frozenset(layers) if suffix is not None else frozenset()
        prefixes.setdefault((suffix, numbers), []).append(prefix)
    suffixes: dict[tuple[tuple[str, ...], frozenset[int]], list[str | None]] = {}
    for (suffix, numbers), shared_prefixes in prefixes.items():
        suffixes.setdefault((tuple(sorted(shared_prefixes)), numbers), []).append(suffix)
    terms = [
        _build_layer_term(shared_prefixes, numbers, shared_suffixes)
        for (shared_prefixes, numbers), shared_suffixes in suffixes.items()
    ]
    return f"^(?:{'|'.join(terms)})$" if len(terms) > 1 else f"^{terms[0]}$"


def build_number_expression(values: Collection[int]) -> str:
    """Return an expression for exactly these numbers, in decimal and without leading zeros."""
    by_length: dict[int, set[str]] = {}
    for value in values:
        by_length.setdefault(len(str(value)), set()).add(str(value))
    terms = (_build_digit_terms(frozenset(texts)) for _, texts in sorted(by_length.items()))
    return _join_alternatives([term for same_length in terms for term in same_length])


def _build_digit_terms(texts: frozenset[str]) -> list[str]:
    """Return expressions for exactly these strings of digits, all of one length."""
    if texts == {""}:
        return [""]
    tails_by_digit: dict[str, set[str]] = {}
    for text in texts:
        tails_by_digit.setdefault(text[0], set()).add(text[1:])
    digits_by_tails: dict[frozenset[str], list[int]] = {}
    for digit, tails in sorted(tails_by_digit.items()):
        digits_by_tails.setdefault(frozenset(tails), []).append(int(digit))
    return [
        _format_digit_class(digits) + _join_alternatives(_build_digit_terms(same_tails))
        for same_tails, digits in digits_by_tails.items()
    ]


def _format_digit_class(digits: Sequence[int]) -> str:
    """Return a digit, or a class of digits with ranges."""
    if len(digits) == 1:
        return str(digits[0])
    text, start = "", 0
    for index in range(1, len(digits) + 1):
        if index == len(digits) or digits[index] != digits[index - 1] + 1:
            run = digits[start:index]
            text += f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(map(str, run))
            start = index
    return f"[{text}]"


def _join_alternatives(terms: Sequence[str]) -> str:
    return terms[0] if len(terms) == 1 else f"(?:{'|'.join(terms)})"


def _build_layer_term(
    prefixes: Sequence[str], layers: frozenset[int], suffixes: Sequence[str | None]
) -> str:
    text = _build_string_expression(prefixes)
    ends = [suffix for suffix in suffixes if suffix is not None]
    if not ends:
        return text
    return text + build_number_expression(layers) + _build_string_expression(ends)


def _build_string_expression(texts: Sequence[str]) -> str:
    """Return an expression for exactly these strings, their common head and tail once."""
    head = _find_common_prefix(texts)
    without_head = [text[len(head) :] for text in texts]
    tail = _find_common_prefix([text[::-1] for text in without_head])[::-1]
    middles = sorted({text[: len(text) - len(tail)] for text in without_head})
    optional = "?" if middles[0] == "" and len(middles) > 1 else ""
    shown = [_escape_text(text) for text in middles if text]
    middle = f"(?:{'|'.join(shown)}){optional}" if len(middles) > 1 else "".join(shown)
    return _escape_text(head) + middle + _escape_text(tail)


def _find_common_prefix(texts: Sequence[str]) -> str:
    """Return the longest beginning that all texts share."""
    first, last = min(texts), max(texts)
    pairs = enumerate(zip(first, last, strict=False))
    differences = (index for index, (a, b) in pairs if a != b)
    return first[: next(differences, min(len(first), len(last)))]


def _escape_text(text: str) -> str:
    """Return a printable expression for exactly this text."""
    return "".join(map(_escape_character, text))


def _escape_character(char: str) -> str:
    if char in _SPECIAL_CHARACTERS:
        return f"\\{char}"
    if char.isprintable():
        return char
    if ord(char) < 0x100:
        return f"\\x{ord(char):02x}"
    raise ModelError(
        f"a name of a KV buffer contains U+{ord(char):04X}, which no expression can write for all",
        hint="rename that buffer first",
    )


def _choose_templates(names: Sequence[tuple[str, int]]) -> Iterator[tuple[_NameTemplate, int]]:
    """Yield a template of each name and its layer: of those possible the most common one."""
    candidates = [list(_list_templates(name, layer)) for name, layer in names]
    counts = Counter(template for templates in candidates for template in templates)
    for (name, layer), templates in zip(names, candidates, strict=True):
        plain = _NameTemplate(name, None)
        yield max(templates, key=lambda template: counts[template], default=plain), layer


def _list_templates(name: str, layer: int) -> Iterator[_NameTemplate]:
    """Yield a template for each occurrence of the layer's number in a name, the last of them."""
    numbers = (n for n in _NUMBER_PATTERN.finditer(name) if n[0] == str(layer))
    for number in deque(numbers, _MAX_TEMPLATES):
        yield _NameTemplate(name[: number.start()], name[number.end() :])


def _check_expression(text: str, expected_names: Collection[str], names: Iterable[str]) -> None:
    """Raise `ModelError` unless an expression matches exactly the expected names."""
    try:
        pattern, python = compile_pattern(text), re.compile(text)
    except (ValueError, re.error) as error:
        raise ModelError(f"no expression selects its KV buffers: {error}") from None
    for name in names:
        expected = name in expected_names
        if pattern.matches(name) is not expected or bool(python.search(name)) is not expected:
            raise ModelError(
                f"no expression selects its KV buffers and nothing else: it fails for {name}",
                hint="rename that value first",
            )
