"""Find what the names of pairs have in common: the layer's number, and the part of the layer.

Of ``past_key_values.0.key`` and ``present.0.key`` the number is the layer, since it counts
along on both sides, and ``key`` is the part, since it stands beside the layer on both. What is
left is the *frame* of the two names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

_NUMBER = re.compile("(?<![0-9])(0|[1-9][0-9]{0,5})(?![0-9])")
_MAX_PIECES = 33
"""Pieces of a name between its numbers; no exporter has names with so many numbers."""
_WORD_CHARACTER = re.compile("[0-9A-Za-z]")
_UNFIT_FOR_TEMPLATES = re.compile(r"[{}\[\]]")


class StateNames(NamedTuple):
    """The names of a pair.

    Attributes:
        input: The name of the input, without a token.
        output: The name of the output, without a token and without `suffix`.
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


class Frame(NamedTuple):
    """What the names of several parts of a layer have in common.

    Attributes:
        before: For the input and the output what comes first.
        between: What is between layer and part.
        after: For the input and the output what comes last, before a token.
        suffix: What follows a token in the name of an output.
        is_part_first: Whether the part comes before the layer.
        own_part: The name of the only part, where both sides have no word for it in common;
            else empty.
    """

    before: tuple[str, str]
    between: str
    after: tuple[str, str]
    suffix: str
    is_part_first: bool
    own_part: str = ""


class FramedState(NamedTuple):
    """A pair with its place in a frame."""

    names: StateNames
    frame: Frame
    part: str
    layer: int


class ListedState(NamedTuple):
    """A pair whose names are only listed, with a part and a layer made up for it."""

    names: StateNames
    part: str
    layer: int


def split_token(input_name: str, output_name: str, tokens: Collection[str]) -> tuple[str, str, str]:
    """Return the names of a pair without a token, and the suffix of the output.

    A token is at the end of the input, after an underscore. In the output it follows what the
    two names have in common if the output begins with the input; else it is at the end, too.

    Args:
        input_name: The name of the input.
        output_name: The name of the output.
        tokens: The tokens that each of them may carry, at most one of them.

    Returns:
        The input, the output without its suffix, and the suffix.
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


def frame_states(states: Sequence[StateNames]) -> tuple[list[FramedState], list[ListedState]]:
    """Return the states whose names have a common frame, and those that can only be listed.

    Args:
        states: The names of all pairs.
    """
    framed: list[FramedState] = []
    unframed: list[StateNames] = []
    for alike in _group_by_skeleton(states):
        found = [each for group in _choose_numbers(alike) for each in _frame_group(group)]
        if len(found) == len(alike) and len({each.frame for each in found}) == 1:
            framed += found
        else:
            unframed += alike
    framed = list(_separate_parts(framed))
    known: set[tuple[str, int]] = set()
    kept = []
    for state in framed:
        if (state.part, state.layer) in known:
            unframed.append(state.names)
        else:
            known.add((state.part, state.layer))
            kept.append(state)
    return kept, list(_list_states(unframed, known))


def _separate_parts(states: Iterable[FramedState]) -> Iterator[FramedState]:
    """Yield the states; a part that an earlier frame has too gets a name and a frame of its own.

    Two rules must not read their names as one buffer.
    """
    frames: dict[str, Frame] = {}
    for state in states:
        if frames.setdefault(state.part, state.frame) != state.frame:
            frame = _build_own_frame(state.frame, state.part)
            state = state._replace(frame=frame, part=frame.own_part)
        yield state


def _build_own_frame(frame: Frame, part: str) -> Frame:
    """Return the frame of one part alone, whose word is not a group."""
    if frame.is_part_first:
        starts = [f"{text}{part}{frame.between}" for text in frame.before]
        ends = list(frame.after)
    else:
        starts = list(frame.before)
        ends = [f"{frame.between}{part}{text}" for text in frame.after]
    name = frame.own_part or _make_part_name([starts[0], ends[0]])
    return Frame((starts[0], starts[1]), "", (ends[0], ends[1]), frame.suffix, False, name)


class _Numbered(NamedTuple):
    """A pair, and which of the numbers in its names is the layer's."""

    names: StateNames
    input_parts: tuple[str, ...]
    output_parts: tuple[str, ...]
    input_number: int
    output_number: int


def _group_by_skeleton(states: Iterable[StateNames]) -> Iterator[list[StateNames]]:
    """Yield the states whose inputs differ in numbers only."""
    groups: dict[str, list[StateNames]] = {}
    for state in states:
        groups.setdefault(_NUMBER.sub("0", state.input), []).append(state)
    yield from groups.values()


def _choose_numbers(states: Sequence[StateNames]) -> Iterator[list[_Numbered]]:
    """Yield the states by their other numbers, with the number that is the layer's.

    It is the one that takes most values, of several the first, and that is the same on both
    sides of each pair.
    """
    inputs = [tuple(_NUMBER.split(state.input)) for state in states]
    outputs = [tuple(_NUMBER.split(state.output)) for state in states]
    is_alike = len({_NUMBER.sub("0", f"{s.output}\0{s.suffix}") for s in states}) == 1
    if not is_alike or max(len(inputs[0]), len(outputs[0])) > _MAX_PIECES:
        return
    choices = [
        (len({parts[i] for parts in inputs}), -i, -j)
        for i, j in product(range(1, len(inputs[0]), 2), range(1, len(outputs[0]), 2))
        if all(into[i] == out[j] for into, out in zip(inputs, outputs, strict=True))
    ]
    if not choices:
        return
    _, i, j = max(choices)
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[_Numbered]] = {}
    for state, into, out in zip(states, inputs, outputs, strict=True):
        key = into[:-i] + into[-i + 1 :], out[:-j] + out[-j + 1 :]
        groups.setdefault(key, []).append(_Numbered(state, into, out, -i, -j))
    yield from groups.values()


def _frame_group(states: Sequence[_Numbered]) -> Iterator[FramedState]:
    """Yield states that differ in the layer only, with their frame; none if it cannot be written.

    A part without a word that both sides have in common gets a frame of its own.
    """
    first = states[0]
    before_in, after_in = _join_around(first.input_parts, first.input_number)
    before_out, after_out = _join_around(first.output_parts, first.output_number)
    ending, beginning = (
        _find_common_words((before_in[::-1], before_out[::-1]))[::-1],
        _find_common_words((after_in, after_out)),
    )
    is_part_first = len(_strip_marks(ending)) > len(_strip_marks(beginning))
    common = ending if is_part_first else beginning
    part = _strip_marks(common)
    befores, afters, suffix = (before_in, before_out), (after_in, after_out), first.names.suffix
    if not part:
        part = _make_part_name([before_in, after_in])
        frame = Frame(befores, "", afters, suffix, False, part)
    else:
        lead, _, trail = common.partition(part)
        if is_part_first:
            befores = (_cut_end(before_in, common) + lead, _cut_end(before_out, common) + lead)
            frame = Frame(befores, trail, afters, suffix, True)
        else:
            afters = (trail + after_in[len(common) :], trail + after_out[len(common) :])
            frame = Frame(befores, lead, afters, suffix, False)
    texts = (*frame.before, frame.between, *frame.after, frame.suffix, part)
    if any(_UNFIT_FOR_TEMPLATES.search(text) for text in texts):
        return
    for state in states:
        yield FramedState(state.names, frame, part, int(state.input_parts[state.input_number]))


def _make_part_name(words: Sequence[str]) -> str:
    """Return a name for a part, of what stands around the layer."""
    return re.sub("[^0-9A-Za-z]+", "_", "_".join(words)).strip("_") or "state"


def _cut_end(text: str, end: str) -> str:
    return text[: len(text) - len(end)]


def _join_around(parts: Sequence[str], number: int) -> tuple[str, str]:
    """Return what is before and after the number at a position."""
    return "".join(parts[:number]), "".join(parts[number + 1 :])


def _find_common_words(texts: Sequence[str]) -> str:
    """Return what texts begin with in common, up to a place where words end on both."""
    first, last = min(texts), max(texts)
    length = next(
        (at for at, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1),
        len(first),
    )
    while length and any(_is_word_split(text, length) for text in texts):
        length -= 1
    return first[:length]


def _is_word_split(text: str, position: int) -> bool:
    return _is_word_at(text, position) and _is_word_at(text, position - 1)


def _strip_marks(text: str) -> str:
    """Return a text from its first letter or digit to its last."""
    start, end = 0, len(text)
    while start < end and not _is_word_at(text, start):
        start += 1
    while start < end and not _is_word_at(text, end - 1):
        end -= 1
    return text[start:end]


def _list_states(
    states: Iterable[StateNames], known: set[tuple[str, int]]
) -> Iterator[ListedState]:
    """Yield states with a part and a layer of their own, made of the names of their inputs."""
    for alike in _group_by_skeleton(states):
        inputs = [_NUMBER.split(state.input) for state in alike]
        numbers = range(1, len(inputs[0]), 2)
        layer_at = max(numbers, key=lambda i: (len({p[i] for p in inputs}), -i), default=None)
        for state, parts in zip(alike, inputs, strict=True):
            layer = 0 if layer_at is None else int(parts[layer_at])
            words = [text for at, text in enumerate(parts) if at != layer_at]
            part = _make_part_name(words)
            count = 1
            unique = part
            while (unique, layer) in known:
                count += 1
                unique = f"{part}_{count}"
            known.add((unique, layer))
            yield ListedState(state, unique, layer)
