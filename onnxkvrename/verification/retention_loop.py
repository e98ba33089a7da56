"""The retention loop, run in onnxruntime as a device would.

Random feeds, a few steps, and what a step retains is fed to the next. Two
models that differ in nothing but names give the same results, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, finding
from onnxkvrename.rules.plan import Pair
from onnxkvrename.verification import ort_session as sessions
from onnxkvrename.verification.ort_session import End, Key, Result, Session

STEPS = 3
"""Enough for what the first step writes to be read, and retained again."""

_SUFFIXES = ("_RetainedState", "_InternalRetainedState", "_output")


class Subject(NamedTuple):
    """A model to run, and its pairs."""

    path: Path
    pairs: Sequence[Pair]


class Run(NamedTuple):
    """What a model gave, step by step.

    ``dims`` are the sizes that the inputs' symbols had. ``retained`` maps each
    output that was fed back to its input, ``names`` an output's key to its name.
    ``unchanged`` are the retained outputs that left every step as their inputs
    entered the first. ``findings`` say what could not be fed back: with one of
    them the loop ends.
    """

    dims: Mapping[str, int]
    retained: Mapping[str, str]
    names: Mapping[Key, str]
    steps: tuple[Mapping[Key, Result], ...]
    unchanged: tuple[str, ...]
    findings: tuple[Finding, ...]


def check(
    model: Subject,
    reference: Subject | None = None,
    *,
    dims: Mapping[str, int] = MappingProxyType({}),
    steps: int = STEPS,
    seed: int = 0,
) -> tuple[Run | None, tuple[Finding, ...]]:
    """Run a model, and hold it against one that should differ in nothing but names.

    There is no run if the model fails where the reference does not: that is a
    finding. Raises what :func:`run` does, for the reference or the model alone.
    """
    if reference is None:
        alone = run(model, dims=dims, steps=steps, seed=seed)
        return alone, alone.findings
    expected = run(reference, dims=dims, steps=steps, seed=seed)
    try:
        found = run(model, dims=dims, steps=steps, seed=seed)
    except ModelError as error:
        return None, (_different("", f"the reference runs, this does not: {error.message}"),)
    return found, (*found.findings, *compare(found, expected))


def run(
    model: Subject,
    *,
    dims: Mapping[str, int] = MappingProxyType({}),
    steps: int = STEPS,
    seed: int = 0,
) -> Run:
    """Run the loop on one model; ``dims`` are sizes of symbols, and others are guessed.

    Feeds follow from the seed, the step and the buffer, so they stay what they
    are when names change. Raises :class:`ModelError` with the reason where
    onnxruntime cannot run the model as it is, or the feeds would take more than
    ``sessions.LIMIT``, and :class:`KvRenameError` without onnxruntime.
    """
    loaded = sessions.load(model.path, _keys(model.pairs), dims)
    retained = _retained(loaded, model.pairs)
    slots = _slots(loaded, model.pairs)
    # What is fed is numpy's memory, and an output may be the same: hold on to it.
    first = {end.name: _feed(loaded, end, 0, seed, slots) for end in loaded.inputs}
    fed = {name: sessions.result(first[into]) for name, into in retained.items()}
    feeds, results, misfits = dict(first), list[dict[str, Result]](), list[Finding]()
    for step in range(steps):
        outputs = sessions.run(loaded, feeds, step)
        results.append({name: sessions.result(value) for name, value in outputs.items()})
        misfits += _misfits(loaded, retained, results[-1])
        if misfits:
            break
        feeds = {into: outputs[name] for name, into in retained.items()}
        feeds |= {
            end.name: _feed(loaded, end, step + 1, seed, slots)
            for end in loaded.inputs
            if end.name not in feeds
        }
    names = {end.key: end.name for end in loaded.outputs}
    keyed = tuple({key: step[name] for key, name in names.items()} for step in results)
    same = [name for name in retained if all(step[name] == fed[name] for step in results)]
    return Run(loaded.dims, retained, names, keyed, tuple(same), tuple(misfits))


def compare(found: Run, expected: Run) -> Iterator[Finding]:
    """Where a model first differs from a reference: in which step, and a buffer rather than logits.

    An output that one of the two has and the other has not is named, too.
    """
    for key, name in expected.names.items():
        if key not in found.names:
            yield _different(name, "is an output of the reference only")
    for key, name in found.names.items():
        if key not in expected.names:
            yield _different(name, "is no output of the reference")
    for number, (one, other) in enumerate(zip(found.steps, expected.steps, strict=False), 1):
        wrong = [key for key in other if key in one and one[key] != other[key]]
        if wrong:
            wrong.sort(key=lambda key: len(key) == 1)
            more = f" (one of {len(wrong)} outputs that differ)" if len(wrong) > 1 else ""
            how = _how(one[wrong[0]], other[wrong[0]])
            yield _different(found.names[wrong[0]], f"in step {number} {how}{more}")
            return


def _different(name: str, message: str) -> Finding:
    hint = "the two differ in more than names: do not use it, and rename the reference again"
    return finding("KV118", name, message, hint)


def _how(one: Result, other: Result) -> str:
    if (one.dtype, one.shape) == (other.dtype, other.shape):
        return "holds other values than with the reference"
    return f"is {_kind(one)}, and not {_kind(other)} as with the reference"


def _kind(value: Result | End) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _keys(pairs: Sequence[Pair]) -> dict[str, Key]:
    return {
        end.old: (pair.scope, pair.buffer, str(pair.layer)) for pair in pairs for end in pair.ends
    }


def _retained(loaded: Session, pairs: Sequence[Pair]) -> dict[str, str]:
    """Each output that is fed back to its input: by the pairs, else by its suffix."""
    given = {end.name: end for end in loaded.inputs}
    into = {pair.output.old: pair.input.old for pair in pairs if pair.input and pair.output}
    for end in loaded.outputs:
        for suffix in _SUFFIXES:
            value = given.get(end.name.removesuffix(suffix))
            if value is not None and end.name not in into and _alike(end, value):
                into[end.name] = value.name
    return {end.name: into[end.name] for end in loaded.outputs if into.get(end.name) in given}


def _alike(one: End, other: End) -> bool:
    """Whether names that only look like a pair are one: the size of a symbol is a guess."""
    return one.name != other.name and (one.dtype, len(one.shape)) == (other.dtype, len(other.shape))


def _slots(loaded: Session, pairs: Sequence[Pair]) -> int:
    """The length of the cache: the context, or where no symbol tells the longest axis 2."""
    buffers = {pair.input.old for pair in pairs if pair.input}
    shapes = [end.shape for end in loaded.inputs if end.name in buffers]
    longest = max((shape[2] for shape in shapes if len(shape) == 4), default=1)
    return loaded.dims.get("ctx_len", longest)


def _feed(loaded: Session, into: End, step: int, seed: int, slots: int) -> Any:
    return sessions.feed(loaded, into, step, seed=seed, slots=slots)


def _misfits(
    loaded: Session, retained: Mapping[str, str], outputs: Mapping[str, Result]
) -> Iterator[Finding]:
    given = {end.name: end for end in loaded.inputs}
    for name, into in retained.items():
        value, end = outputs[name], given[into]
        if (value.dtype, value.shape) != (end.dtype, end.shape):
            yield finding(
                "KV118",
                name,
                f"comes out as {_kind(value)}, and cannot go back into {into}, {_kind(end)}",
                "both sides of a buffer share one piece of memory; export the model again",
            )
