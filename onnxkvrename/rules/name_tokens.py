"""Find the tokens that names of pairs carry already, where no rule tells a token from a name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.errors import RulesError
from onnxkvrename.rules.checks import CONSUMER_TOKENS
from onnxkvrename.rules.profile import find_token_error

_DIGITS = re.compile("[0-9]+")
_WORD_CHARACTER = re.compile("[0-9A-Za-z]")


class NamedPair(NamedTuple):
    """The names of a pair, and what tells whether two pairs are of one kind.

    The update is how the output is made, and its dtype; the shape is that of the input, ``None`` if
    it is not known.
    """

    input: str
    output: str
    update: tuple[str, ...] = ()
    shape: tuple[object, ...] | None = None


class NamedModel(NamedTuple):
    """A model as its names show it: its buffers, and the names of all inputs and outputs."""

    pairs: Sequence[NamedPair]
    names: Collection[str]


def find_tokens(models: Sequence[NamedModel], requested: str = "") -> tuple[str, ...]:
    """Return the tokens that pairs of some models carry, each on both sides of a pair.

    A token has a capital letter, as those of all known consumers have. A word without which two
    names would be one is a part of the names: ``past_0_K`` and ``past_0_V`` carry no token. So is
    one that counts layers.

    Args:
        models: The models.
        requested: The token that a command was told, which counts in any case; empty for none.

    Returns:
        The tokens, `requested` first.

    Raises:
        RulesError: `requested` is a part of names, or a token is not at the end of a name, so
            that a second one would be added; or a token of one model is a part of names in
            another one.
    """
    tokens: dict[str, None] = {requested: None} if requested else {}
    parts: dict[str, str] = {}
    for model in models:
        carriers = _list_carriers(model.pairs)
        own_parts = _find_parts_of_names(carriers, model.names)
        if requested:  # a part of a name may be before it
            plain = [_remove_tokens(pair, (requested,)) for pair in model.pairs]
            names = {name for pair in plain for name in (pair.input, pair.output)}
            own_parts |= _find_parts_of_names(_list_carriers(plain), names.union(model.names))
        parts.update(own_parts)
        tokens.update(
            dict.fromkeys(
                word for word in carriers if word not in own_parts and word != word.lower()
            )
        )
    for token in tokens:
        if token in parts:
            raise RulesError(
                f"{token} cannot be distinguished from a token: it is a part of {parts[token]}, "
                "which would not be unique without it",
                hint="choose a different token"
                if token == requested and len(models) == 1
                else "name the models one by one, with a different token",
            )
    if requested:
        for model in models:
            _check_places(model, tokens, requested)
    return tuple(tokens)


def split_token(input_name: str, output_name: str, tokens: Collection[str]) -> tuple[str, str, str]:
    """Return the names of a pair without a token, and the suffix of the output.

    A token is at the end of the input, after an underscore. In the output it follows what the
    two names have in common if the output begins with the input; else it is at the end, too.

    Each name carries at most one of the tokens.
    """
    core = _cut_token(input_name, tokens)
    if output_name.startswith(core) and output_name != core:
        suffix = output_name[len(core) :]
        for token in tokens:
            if suffix.startswith(f"_{token}") and not _is_word_at(suffix, len(token) + 1):
                suffix = suffix[len(token) + 1 :]
                break
        if not suffix:
            return core, core, ""
        if not _is_word_at(suffix, 0):
            return core, core, suffix
    return core, _cut_token(output_name, tokens), ""


def _cut_token(name: str, tokens: Collection[str]) -> str:
    """Return a name without the one of some tokens that is at its end."""
    start, _, end = name.rpartition("_")
    return start if end in tokens else name


def _is_word_at(text: str, position: int) -> bool:
    """Return whether a letter or digit is at a position."""
    return _WORD_CHARACTER.match(text, position) is not None


def select_for_token(pairs: Sequence[NamedPair], tokens: Collection[str]) -> list[bool]:
    """Tell for each pair of a model whether its names should carry a token.

    If no pair carries any, all should. Else those that do, and those that are like one of them:
    then a part of the model was renamed. All others were left alone when the model was renamed,
    as by a profile that knows which of them are caches.
    """
    carriers = [has_token(pair, tokens) for pair in pairs]
    if not any(carriers):
        return [True] * len(pairs)
    known = {
        trait
        for pair, carries in zip(pairs, carriers, strict=True)
        if carries
        for trait in _list_traits(pair, tokens)
    }
    return [
        carries or not known.isdisjoint(_list_traits(pair, tokens))
        for pair, carries in zip(pairs, carriers, strict=True)
    ]


def _list_carriers(pairs: Sequence[NamedPair]) -> dict[str, list[NamedPair]]:
    """Return what may be tokens, with the pairs that have it at the end on both sides."""
    carriers: dict[str, list[NamedPair]] = {}
    for pair in pairs:
        token = _find_last_word(pair)
        if token:
            carriers.setdefault(token, []).append(pair)
    return carriers


def _find_last_word(pair: NamedPair) -> str:
    """Return what may be the token of a pair; empty if both sides have nothing like one."""
    word = pair.input.rpartition("_")[2]
    is_possible = find_token_error(word) is None and not word.isdigit()
    return word if is_possible and _carries(pair, word) else ""


def _carries(pair: NamedPair, token: str) -> bool:
    """Return whether both names of a pair have a token where a rename by dataflow puts it."""
    core, output, suffix = split_token(pair.input, pair.output, (token,))
    return (f"{core}_{token}", f"{output}_{token}{suffix}") == (pair.input, pair.output)


def has_token(pair: NamedPair, tokens: Collection[str]) -> bool:
    """Return whether a name of a pair carries one of some tokens, on either side."""
    return _remove_tokens(pair, tokens) != pair


def _remove_tokens(pair: NamedPair, tokens: Collection[str]) -> NamedPair:
    core, output, suffix = split_token(pair.input, pair.output, tokens)
    return pair._replace(input=core, output=f"{output}{suffix}")


def _find_parts_of_names(
    carriers: Mapping[str, Sequence[NamedPair]], names: Collection[str]
) -> dict[str, str]:
    """Return the words that only look like tokens, each with a name that has it.

    Names that differ in such words only would be one without them; or the words count layers, in
    names without another number: ``k_L0``, ``k_L1``.
    """
    parts: dict[str, str] = {}
    owners: dict[tuple[str, str], tuple[str, str]] = {}
    forms = Counter(_DIGITS.sub("0", word) for word in carriers)
    for word, pairs in carriers.items():
        for pair in pairs:
            plain = _remove_tokens(pair, (word,))
            for side in (("input", plain.input), ("output", plain.output)):
                other = owners.setdefault(side, (word, pair.input))
                if other[0] != word:
                    parts.update([other, (word, pair.input)])
                elif side[1] in names:
                    parts[word] = pair.input
        is_counting = forms[_DIGITS.sub("0", word)] > 1
        if is_counting and not any(_DIGITS.search(pair.input.removesuffix(word)) for pair in pairs):
            parts[word] = pairs[0].input
    return parts


def _find_form(pair: NamedPair, tokens: Collection[str]) -> tuple[object, ...]:
    """Return what names of different layers have in common."""
    rank = None if pair.shape is None else len(pair.shape)
    names = split_token(pair.input, pair.output, tokens)
    return (*(_DIGITS.sub("0", name) for name in names), pair.update, rank)


def _list_traits(pair: NamedPair, tokens: Collection[str]) -> Iterator[tuple[object, ...]]:
    """Yield the form of a pair's names, and what it holds: pairs of one kind share either."""
    yield _find_form(pair, tokens)
    if pair.shape is not None:
        yield pair.update, pair.shape


def _check_places(model: NamedModel, tokens: Collection[str], requested: str) -> None:
    """Raise RulesError if names have a token where a rename by dataflow does not put it."""
    known = {token for token, _ in CONSUMER_TOKENS.values()}
    known |= {requested} if requested != requested.lower() else set()
    words = re.compile(f"(?<![0-9A-Za-z])(?:{'|'.join(sorted(known))})(?![0-9A-Za-z])")
    for pair in model.pairs:
        if any(_carries(pair, token) for token in known):
            continue
        plain = _remove_tokens(pair, {*tokens, *known})
        for name, rest in ((pair.input, plain.input), (pair.output, plain.output)):
            found = words.search(rest)
            if found is not None:
                raise RulesError(
                    f"{name} already has {found[0]}, but not where --pairs puts a token",
                    hint="use the rules that put it there, with --profile or --rules",
                )
