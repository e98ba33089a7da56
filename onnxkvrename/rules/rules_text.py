"""Write rules that recognise given pairs, as a file in the language of profiles."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from onnxkvrename import __version__
from onnxkvrename.errors import RulesError
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.name_patterns import KvTable, Nature
from onnxkvrename.rules.profile import UPDATES

_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits)
_END = re.compile(r"[._-](?:in|input|out|output)\Z")
_BARE_KEY = re.compile("[A-Za-z0-9_-]+")


def find_suffixes(input_name: str, output_name: str) -> tuple[str, str]:
    """Return what follows a token in the names of both sides.

    That is what the output's name has after the input's (``past.0``, ``past.0_out``), and what
    both have after the layer (``past_0_in``, ``past_0_out``), as profiles have it.
    """
    more = output_name.removeprefix(input_name)
    if more not in ("", output_name):
        return "", "" if more[0] in _WORD_CHARACTERS else more
    (stem, before), (output_stem, after) = map(split_end, (input_name, output_name))
    is_layer = stem == output_stem and stem[-1:].isdigit()
    is_in_and_out = before[1:2] == "i" and after[1:2] == "o"
    return (before, after) if is_layer and is_in_and_out else ("", "")


def split_end(name: str) -> tuple[str, str]:
    """Return a name without ``_in``, ``_out`` or such a word at its end, and that."""
    end = _END.search(name)
    return (name, "") if end is None else (name[: end.start()], end[0])


def write_rules(
    tables: Sequence[KvTable],
    title: str,
    keep: Mapping[str, str] = _NO_NAMES,
    notes: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return rules in TOML.

    Args:
        tables: What they say of each kind of names.
        title: The models that they are from, for the first line.
        keep: Patterns of names that are left alone, each with the reason.
        notes: What comments say above the table of each reason.

    Raises:
        RulesError: A name cannot be written in TOML.
    """
    lines = [
        f"# {clean_comment(title)}, found by dataflow with onnxkvrename {__version__}.",
        "#",
        "# To rename them: onnxkvrename MODEL --prefix TOKEN --rules THIS_FILE",
        *_write_tables(tables),
    ]
    for reason in dict.fromkeys(keep.values()):
        patterns = [pattern for pattern, why in keep.items() if why == reason]
        lines += [
            "",
            *(f"# {clean_comment(note)}" for note in notes.get(reason, ())),
            "[[keep]]",
            f"reason = {_quote(reason)}",
            f"pattern = {_quote('|'.join(patterns))}",
        ]
    return "\n".join(lines) + "\n"


def clean_comment(text: str) -> str:
    """Return a text that stays within one line of a comment."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _write_tables(tables: Sequence[KvTable]) -> Iterator[str]:
    """Yield the lines of each table."""
    kinds = _name_kinds(tables)
    quantized = {
        state.part for table in tables for state in table.states if state.names.is_quantized
    }
    for table in tables:
        kind, update, is_open, is_alone = table.nature
        first, *others = table.parts
        yield from ("", "[[kv]]", f'kind = "{kind}"')
        if kinds[first] != kind:
            yield f'name = "{kinds[first]}"'
        yield f"input = {_quote(table.input)}"
        yield f"output = {_quote(table.output)}"
        if not table.is_pattern:
            yield f"layer = {table.states[0].layer}"
        if table.roles:
            yield f"roles = {_write_words(table.roles)}"
        elif not others:
            yield f"part = {_quote(first)}"
        if update in UPDATES:
            yield f'update = "{update}"'
        beside = {
            part: main
            for part in table.parts
            if part not in quantized
            for main in quantized
            if part.startswith(main) and kinds[part] == kinds[main]
        }
        if beside:
            yield f"beside = {_write_words(beside)}"
        if is_open:
            yield "by_shape = true"
        if is_alone:
            yield 'alone = ["output"]'


def _write_words(words: Mapping[str, str]) -> str:
    """Return a table of words as a value of TOML."""
    rows = (f"{_quote_key(key)} = {_quote(value)}" for key, value in words.items())
    return f"{{ {', '.join(rows)} }}"


def _quote_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quote(key)


def _name_kinds(tables: Iterable[KvTable]) -> dict[str, str]:
    """Return the name of each part's kind, which has the parts of the same layers and update.

    Each layer of a model must have all parts of its kinds.
    """
    layers: dict[str, set[tuple[int, frozenset[int]]]] = {}
    natures: dict[str, Nature] = {}
    for table in tables:
        for state in table.states:
            layers.setdefault(state.part, set()).add((state.layer, state.names.models))
            natures[state.part] = table.nature
    found: dict[tuple[Nature, Collection[tuple[int, frozenset[int]]]], str] = {}
    kinds = {}
    for part, nature in natures.items():
        key = nature, frozenset(layers[part])
        number = 1 + sum(nature.kind == other.kind for other, _ in found)
        name = nature.kind if number == 1 else f"{nature.kind}_{number}"
        kinds[part] = found.setdefault(key, name)
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
