"""Write rules that recognise given pairs, as a file in the language of profiles."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename import __version__
from onnxkvrename.errors import RulesError
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.profile import UPDATES

_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits)
_NUMBER = re.compile("(?<![0-9])(0|[1-9][0-9]{0,5})(?![0-9])")


class StateNames(NamedTuple):
    """The names of a pair.

    Attributes:
        input: The name of the input.
        output: The name of the output, without `suffix`.
        suffix: What follows a token in the name of the output.
        kind: The kind of buffer, such as ``attention``.
        update: How it is updated; empty if that is not known.
        is_quantized: Whether it holds integers, which scales belong to.
    """

    input: str
    output: str
    suffix: str
    kind: str
    update: str
    is_quantized: bool = False


class _PlacedState(NamedTuple):
    """A pair with a part and a layer, which its names suggest."""

    names: StateNames
    part: str
    layer: int


def split_suffix(input_name: str, output_name: str) -> tuple[str, str]:
    """Return an output's name without what it has after its input's, and that.

    A rename puts the token before it, so it must not begin in the middle of a word.
    """
    suffix = output_name.removeprefix(input_name)
    if suffix in ("", output_name) or suffix[0] in _WORD_CHARACTERS:
        return output_name, ""
    return input_name, suffix


def write_rules(
    states: Sequence[StateNames],
    title: str,
    kept_names: Mapping[str, str] = _NO_NAMES,
    notes: Mapping[str, str] = _NO_NAMES,
) -> str:
    """Return rules that list the names of pairs, in TOML.

    The title, for the first line, says which model they are from.
    Names in `kept_names` are left alone, each with the reason; `notes` say more of some of them, in
    comments.

    Raises:
        RulesError: A name cannot be written in TOML.
    """
    placed = list(_place_states(states))
    lines = [
        f"# {clean_comment(title)}, found by dataflow with onnxkvrename {__version__}.",
        "#",
        "# To rename them: onnxkvrename MODEL --prefix TOKEN --rules THIS_FILE",
        *_write_tables(placed),
    ]
    for reason in dict.fromkeys(kept_names.values()):
        names = [name for name, why in kept_names.items() if why == reason]
        lines += [
            "",
            *(f"# {clean_comment(notes[name])}" for name in names if name in notes),
            "[[keep]]",
            f"reason = {_quote(reason)}",
            f"pattern = {_quote('|'.join(map(re.escape, names)))}",
        ]
    return "\n".join(lines) + "\n"


def clean_comment(text: str) -> str:
    """Return a text that stays within one line of a comment."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _place_states(states: Iterable[StateNames]) -> Iterator[_PlacedState]:
    """Yield states with their layers and parts: the number that varies most, and what is left.

    Without a number in the inputs that may be a layer, it is one of the outputs.
    """
    known: set[tuple[str, int]] = set()
    natures: dict[str, tuple[str, str]] = {}
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
        for state, parts in zip(alike, names, strict=True):
            layer = 0 if layer_at is None else int(parts[layer_at])
            words = [text for at, text in enumerate(parts) if at != layer_at]
            part = _make_part_name(words)
            unique, count = part, 1
            nature = state.kind, state.update  # one for each part
            while (unique, layer) in known or natures.setdefault(unique, nature) != nature:
                count += 1
                unique = f"{part}_{count}"
            known.add((unique, layer))
            yield _PlacedState(state, unique, layer)


def _find_layer_number(
    names: Sequence[Sequence[str]], others: Sequence[Sequence[str]]
) -> int | None:
    """Return which number of names that differ in numbers alone is the layer, by its position.

    The number of a value, as exporters give one to what has no name, is none: a layer has several
    parts, or is in the other names as well, or layers are counted from 0.

    Args:
        names: The names, divided into texts and numbers.
        others: The names of the other sides, divided likewise; none if they do not count.
    """

    def may_be_layer(at: int) -> bool:
        numbers = [parts[at] for parts in names]
        is_in_others = bool(others) and all(
            number in other[1::2] for number, other in zip(numbers, others, strict=True)
        )
        counts = {*Counter(numbers).values()}
        is_counted = {*map(int, numbers)} == {*range(len({*numbers}))}
        return is_in_others or is_counted or (len(counts) == 1 and min(counts) > 1)

    positions = filter(may_be_layer, range(1, len(names[0]), 2))
    return max(positions, key=lambda at: (len({parts[at] for parts in names}), -at), default=None)


def _make_part_name(words: Sequence[str]) -> str:
    """Return a name for a part, of what stands around the layer."""
    return re.sub("[^0-9A-Za-z]+", "_", "_".join(words)).strip("_") or "state"


def _write_tables(states: Sequence[_PlacedState]) -> Iterator[str]:
    """Yield a table for each state."""
    kinds = _name_kinds(states)
    quantized = {state.part for state in states if state.names.is_quantized}
    for names, part, layer in states:
        yield from ("", "[[kv]]", f'kind = "{names.kind}"')
        if kinds[part] != names.kind:
            yield f'name = "{kinds[part]}"'
        yield f"input = {_quote(f'{re.escape(names.input)}{{token}}')}"
        yield f"output = {_quote(f'{re.escape(names.output)}{{token}}{re.escape(names.suffix)}')}"
        yield f"layer = {layer}"
        yield f"part = {_quote(part)}"
        if names.update in UPDATES:
            yield f'update = "{names.update}"'
        for main in quantized:
            if part.startswith(main) and part not in quantized and kinds[part] == kinds[main]:
                yield f"beside = {{ {_quote(part)} = {_quote(main)} }}"


def _name_kinds(states: Iterable[_PlacedState]) -> dict[str, str]:
    """Return the name of each part's kind, which has the parts of the same layers and update."""
    layers: dict[str, set[int]] = {}
    natures: dict[str, tuple[str, str]] = {}
    for names, part, layer in states:
        layers.setdefault(part, set()).add(layer)
        natures[part] = names.kind, names.update
    found: dict[tuple[str, str, frozenset[int]], str] = {}
    kinds = {}
    for part, nature in natures.items():
        key = (*nature, frozenset(layers[part]))
        number = 1 + sum(kind == key[0] for kind, *_ in found)
        kinds[part] = found.setdefault(key, key[0] if number == 1 else f"{key[0]}_{number}")
    return kinds


def _quote(text: str) -> str:
    r"""Return a text as a value of TOML, which every terminal shows as it is written here.

    What is escaped where it is printed (``##name[``, characters that are not seen) would be
    another name, so all but plain ASCII is written as TOML's own escapes.
    """
    if text.isascii() and text.isprintable() and "'" not in text and "##" not in text:
        is_pattern = not {*text}.isdisjoint('\\"{')
        return f"'{text}'" if is_pattern else f'"{text}"'
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RulesError(
            f"the name {shorten_text(text)!r} is not Unicode, so no rules can be written for it",
            hint="export the model again, with different names",
        ) from None
    escaped = "".join(
        character
        if " " <= character <= "~" and character not in '"\\#'
        else f"\\U{ord(character):08X}"
        for character in text
    )
    return f'"{escaped}"'
