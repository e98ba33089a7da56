"""Write rules that recognise given pairs, as a file in the language of profiles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename import __version__
from onnxkvrename.errors import RulesError
from onnxkvrename.rules.profile import UPDATES
from onnxkvrename.rules.suggestion.frames import (
    Frame,
    FramedState,
    ListedState,
    StateNames,
    frame_states,
)

_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_NO_BRANCHES: Mapping[str, bool] = MappingProxyType({})
_LAYER = "(?P<layer>0|[1-9][0-9]{0,5})"
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")


class SuggestedRules(NamedTuple):
    """Rules that recognise given pairs.

    Attributes:
        text: The rules, in TOML.
        framed_count: The pairs that patterns recognise, also in other models of that kind.
        listed: The pairs whose names are only listed.
    """

    text: str
    framed_count: int
    listed: tuple[StateNames, ...]


def write_rules(
    states: Sequence[StateNames],
    title: str,
    tokens: Iterable[str] = (),
    kept_names: Mapping[str, str] = _NO_NAMES,
    branches: Mapping[str, bool] = _NO_BRANCHES,
) -> SuggestedRules:
    """Write rules for the names of pairs.

    Args:
        states: The names, without a token.
        title: The models that the names are from, for the first line.
        tokens: The only tokens that the rules recognise; none for any.
        kept_names: Names that the rules leave alone, each with the reason.
        branches: Inputs that choose a branch, each with its value in the first step.

    Raises:
        RulesError: A name cannot be written in TOML.
    """
    framed, listed = frame_states(states)
    kinds = _name_kinds([*framed, *listed])
    lines = [
        f"# {_clean_comment(title)}, found by dataflow with onnxkvrename {__version__}.",
        "#",
        "# To rename them: onnxkvrename MODEL --prefix TOKEN --rules THIS_FILE",
    ]
    if listed:
        lines += ["#", f"# {len(listed)} pairs are listed by name: they fit this export only."]
    frames: dict[Frame, list[FramedState]] = {}
    for state in framed:
        frames.setdefault(state.frame, []).append(state)
    token_pattern = "|".join(map(_escape, tokens)) or "[A-Za-z0-9]+"
    for frame, members in frames.items():
        lines += ["", *_write_frame(frame, members, kinds, token_pattern)]
    suffixes: dict[str, list[ListedState]] = {}
    for item in listed:
        suffixes.setdefault(item.names.suffix, []).append(item)
    for suffix, items in suffixes.items():
        lines += ["", *_write_list(suffix, items, kinds)]
    for reason in dict.fromkeys(kept_names.values()):
        names = [_escape(name) for name, why in kept_names.items() if why == reason]
        lines += [
            "",
            "[[keep]]",
            f"reason = {_quote(reason)}",
            f"pattern = {_quote('|'.join(names))}",
        ]
    for name, first in branches.items():
        lines += ["", "[[branch]]", f"input = {_quote(name)}", f"first = {str(first).lower()}"]
    return SuggestedRules("\n".join(lines) + "\n", len(framed), tuple(i.names for i in listed))


def _clean_comment(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _name_kinds(states: Iterable[FramedState | ListedState]) -> dict[str, str]:
    """Return the kind of each part: those in the same layers with the same update are one kind."""
    layers: dict[str, set[int]] = {}
    natures: dict[str, set[tuple[str, str]]] = {}
    for state in states:
        layers.setdefault(state.part, set()).add(state.layer)
        natures.setdefault(state.part, set()).add((state.names.kind, state.names.update))
    names: dict[tuple[object, ...], str] = {}
    counts: dict[str, int] = {}
    kinds = {}
    for part, own in natures.items():
        kind, update = next(iter(own)) if len(own) == 1 else (min(own)[0], "")
        key = kind, update, frozenset(layers[part])
        if key not in names:
            counts[kind] = counts.get(kind, 0) + 1
            names[key] = kind if counts[kind] == 1 else f"{kind}_{counts[kind]}"
        kinds[part] = names[key]
    return kinds


def _write_frame(
    frame: Frame, states: Sequence[FramedState], kinds: Mapping[str, str], token_pattern: str
) -> Iterator[str]:
    """Yield a [[kv]] rule of patterns."""
    parts = tuple(dict.fromkeys(state.part for state in states))
    first = states[0].names
    yield "[[kv]]"
    yield f"# {_clean_comment(first.input)} -> {_clean_comment(first.output + first.suffix)}"
    token = f"(?:_(?P<token>{token_pattern}))?"
    choice = "|".join(_escape(part) for part in sorted(parts, key=len, reverse=True))
    group, place = ("", "") if frame.own_part else (f"(?P<buffer>{choice})", "{buffer}")
    for side, name in enumerate(("input", "output")):
        pattern = _fill_frame(frame, side, group, _LAYER, is_pattern=True)
        suffix = _escape(frame.suffix) if side else ""
        yield f"{name} = {_quote(f'{pattern}{token}{suffix}')}"
    for side, name in enumerate(("input", "output")):
        template = _fill_frame(frame, side, place, "{layer}", is_pattern=False)
        suffix = frame.suffix if side else ""
        yield f"{name}_name = {_quote(f'{template}[_{{token}}]{suffix}')}"
    yield from _write_kinds([(state.part, state.names) for state in states], kinds)


def _fill_frame(frame: Frame, side: int, part: str, layer: str, *, is_pattern: bool) -> str:
    """Return the names of one side, as a pattern or as a template."""
    quote = _escape if is_pattern else str
    first, second = (part, layer) if frame.is_part_first else (layer, part)
    before, between, after = map(quote, (frame.before[side], frame.between, frame.after[side]))
    return f"{before}{first}{between}{second}{after}"


def _write_list(
    suffix: str, items: Sequence[ListedState], kinds: Mapping[str, str]
) -> Iterator[str]:
    """Yield a [[kv]] rule that lists names."""
    yield "[[kv]]"
    if suffix:
        yield f"suffix = {_quote(suffix)}"
    yield "names = ["
    for item in items:
        yield (
            f"  {{ layer = {item.layer}, buffer = {_quote(item.part)}, "
            f"input = {_quote(item.names.input)}, output = {_quote(item.names.output)} }},"
        )
    yield "]"
    yield from _write_kinds([(item.part, item.names) for item in items], kinds)


def _write_kinds(
    states: Iterable[tuple[str, StateNames]], kinds: Mapping[str, str]
) -> Iterator[str]:
    """Yield the kinds of parts, and how they are updated."""
    states_by_kind: dict[str, list[tuple[str, StateNames]]] = {}
    for part, names in states:
        states_by_kind.setdefault(kinds[part], []).append((part, names))
    for kind, members in states_by_kind.items():
        parts = tuple(dict.fromkeys(part for part, _ in members))
        updates = {names.update for _, names in members}
        yield f"[kv.kinds.{kind}]"
        yield f"parts = [{', '.join(map(_quote, parts))}]"
        base = members[0][1].kind
        if kind != base:
            yield f'kind = "{base}"'
        if len(updates) == 1 and updates <= {*UPDATES}:
            yield f'update = "{min(updates)}"'
        quantized = tuple(dict.fromkeys(part for part, names in members if names.is_quantized))
        scales = [
            f"{_quote(part)} = {_quote(main)}"
            for part in parts
            for main in quantized
            if part not in quantized and part.startswith(main)
        ]
        if scales:
            yield f"beside = {{ {', '.join(scales)} }}"


def _escape(text: str) -> str:
    """Return a pattern that matches a text."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def _quote(text: str) -> str:
    r"""Return a text as a value of TOML, which every terminal shows as it is written here.

    What is escaped where it is printed (``##name[``, characters that are not seen) would be
    another name, so all but plain ASCII is written as TOML's own escapes.
    """
    if text.isascii() and text.isprintable() and "'" not in text and "##" not in text:
        return f"'{text}'" if "\\" in text or '"' in text else f'"{text}"'
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RulesError(
            f"the name {text[:60]!r} is not Unicode, so no rules can be written for it",
            hint="export the model again, with different names",
        ) from None
    escaped = "".join(
        character
        if " " <= character <= "~" and character not in '"\\#'
        else f"\\U{ord(character):08X}"
        for character in text
    )
    return f'"{escaped}"'
