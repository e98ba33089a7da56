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
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.verification.ort_session import (
    OrtSession,
    OutputResult,
    SessionValue,
    ValueKey,
    build_feed,
    digest_value,
    load_session,
    run_step,
)

DEFAULT_STEPS = 3
"""Enough for what the first step writes to be read, and retained again."""

_RETAINED_SUFFIXES = ("_RetainedState", "_InternalRetainedState", "_output")


class RunnableModel(NamedTuple):
    """A model to run, and its pairs."""

    path: Path
    pairs: Sequence[KvPair]


class RetentionRun(NamedTuple):
    """What a model gave, step by step.

    ``dims`` are the sizes that the inputs' symbols had. ``retained`` maps each
    output that was fed back to its input, ``names`` an output's key to its name.
    ``unchanged`` are the retained outputs that left every step as their inputs
    entered the first. ``findings`` say what could not be fed back: with one of
    them the loop ends.
    """

    dims: Mapping[str, int]
    retained_inputs: Mapping[str, str]
    output_names: Mapping[ValueKey, str]
    step_results: tuple[Mapping[ValueKey, OutputResult], ...]
    unchanged_outputs: tuple[str, ...]
    findings: tuple[Finding, ...]


def check_retention(
    model: RunnableModel,
    reference: RunnableModel | None = None,
    *,
    dims: Mapping[str, int] = MappingProxyType({}),
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
) -> tuple[RetentionRun | None, tuple[Finding, ...]]:
    """Run a model, and hold it against one that should differ in nothing but names.

    There is no run if the model fails where the reference does not: that is a
    finding. Raises what :func:`run` does, for the reference or the model alone.
    """
    if reference is None:
        alone = run_retention_loop(model, dims=dims, steps=steps, seed=seed)
        return alone, alone.findings
    expected = run_retention_loop(reference, dims=dims, steps=steps, seed=seed)
    try:
        found = run_retention_loop(model, dims=dims, steps=steps, seed=seed)
    except ModelError as error:
        return None, (
            _build_difference_finding("", f"the reference runs, this does not: {error.message}"),
        )
    return found, (*found.findings, *compare_runs(found, expected))


def run_retention_loop(
    model: RunnableModel,
    *,
    dims: Mapping[str, int] = MappingProxyType({}),
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
) -> RetentionRun:
    """Run the loop on one model; ``dims`` are sizes of symbols, and others are guessed.

    Feeds follow from the seed, the step and the buffer, so they stay what they
    are when names change. Raises :class:`ModelError` with the reason where
    onnxruntime cannot run the model as it is, or the feeds would take more than
    ``sessions.LIMIT``, and :class:`KvRenameError` without onnxruntime.
    """
    loaded = load_session(model.path, _build_keys(model.pairs), dims)
    retained = _match_retained_outputs(loaded, model.pairs)
    slots = _find_cache_length(loaded, model.pairs)
    # What is fed is numpy's memory, and an output may be the same: hold on to it.
    first = {end.name: _build_feed(loaded, end, 0, seed, slots) for end in loaded.inputs}
    fed = {name: digest_value(first[into]) for name, into in retained.items()}
    feeds, results, misfits = dict(first), list[dict[str, OutputResult]](), list[Finding]()
    for step in range(steps):
        outputs = run_step(loaded, feeds, step)
        results.append({name: digest_value(value) for name, value in outputs.items()})
        misfits += _check_feedback(loaded, retained, results[-1])
        if misfits:
            break
        feeds = {into: outputs[name] for name, into in retained.items()}
        feeds |= {
            end.name: _build_feed(loaded, end, step + 1, seed, slots)
            for end in loaded.inputs
            if end.name not in feeds
        }
    names = {end.key: end.name for end in loaded.outputs}
    keyed = tuple({key: step[name] for key, name in names.items()} for step in results)
    same = [name for name in retained if all(step[name] == fed[name] for step in results)]
    return RetentionRun(loaded.dims, retained, names, keyed, tuple(same), tuple(misfits))


def compare_runs(found: RetentionRun, expected: RetentionRun) -> Iterator[Finding]:
    """Where a model first differs from a reference: in which step, and a buffer rather than logits.

    An output that one of the two has and the other has not is named, too.
    """
    for key, name in expected.output_names.items():
        if key not in found.output_names:
            yield _build_difference_finding(name, "is an output of the reference only")
    for key, name in found.output_names.items():
        if key not in expected.output_names:
            yield _build_difference_finding(name, "is no output of the reference")
    for number, (one, other) in enumerate(
        zip(found.step_results, expected.step_results, strict=False), 1
    ):
        wrong = [key for key in other if key in one and one[key] != other[key]]
        if wrong:
            wrong.sort(key=lambda key: len(key) == 1)
            more = f" (one of {len(wrong)} outputs that differ)" if len(wrong) > 1 else ""
            how = _describe_difference(one[wrong[0]], other[wrong[0]])
            yield _build_difference_finding(
                found.output_names[wrong[0]], f"in step {number} {how}{more}"
            )
            return


def _build_difference_finding(name: str, message: str) -> Finding:
    hint = "the two differ in more than names: do not use it, and rename the reference again"
    return build_finding("KV118", name, message, hint)


def _describe_difference(one: OutputResult, other: OutputResult) -> str:
    if (one.dtype, one.shape) == (other.dtype, other.shape):
        return "holds other values than with the reference"
    return f"is {_format_dtype_and_shape(one)}, and not {_format_dtype_and_shape(other)} as with the reference"


def _format_dtype_and_shape(value: OutputResult | SessionValue) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _build_keys(pairs: Sequence[KvPair]) -> dict[str, ValueKey]:
    return {
        end.old_name: (pair.scope, pair.buffer, str(pair.layer))
        for pair in pairs
        for end in pair.sides
    }


def _match_retained_outputs(loaded: OrtSession, pairs: Sequence[KvPair]) -> dict[str, str]:
    """Each output that is fed back to its input: by the pairs, else by its suffix."""
    given = {end.name: end for end in loaded.inputs}
    into = {
        pair.output.old_name: pair.input.old_name for pair in pairs if pair.input and pair.output
    }
    for end in loaded.outputs:
        for suffix in _RETAINED_SUFFIXES:
            value = given.get(end.name.removesuffix(suffix))
            if value is not None and end.name not in into and _can_be_pair(end, value):
                into[end.name] = value.name
    return {end.name: into[end.name] for end in loaded.outputs if into.get(end.name) in given}


def _can_be_pair(one: SessionValue, other: SessionValue) -> bool:
    """Whether names that only look like a pair are one: the size of a symbol is a guess."""
    return one.name != other.name and (one.dtype, len(one.shape)) == (other.dtype, len(other.shape))


def _find_cache_length(loaded: OrtSession, pairs: Sequence[KvPair]) -> int:
    """The length of the cache: the context, or where no symbol tells the longest axis 2."""
    buffers = {pair.input.old_name for pair in pairs if pair.input}
    shapes = [end.shape for end in loaded.inputs if end.name in buffers]
    longest = max((shape[2] for shape in shapes if len(shape) == 4), default=1)
    return loaded.dims.get("ctx_len", longest)


def _build_feed(loaded: OrtSession, into: SessionValue, step: int, seed: int, slots: int) -> Any:
    return build_feed(loaded, into, step, seed=seed, slots=slots)


def _check_feedback(
    loaded: OrtSession, retained: Mapping[str, str], outputs: Mapping[str, OutputResult]
) -> Iterator[Finding]:
    given = {end.name: end for end in loaded.inputs}
    for name, into in retained.items():
        value, end = outputs[name], given[into]
        if (value.dtype, value.shape) != (end.dtype, end.shape):
            yield build_finding(
                "KV118",
                name,
                f"comes out as {_format_dtype_and_shape(value)}, and cannot go back into {into}, {_format_dtype_and_shape(end)}",
                "both sides of a buffer share one piece of memory; export the model again",
            )
