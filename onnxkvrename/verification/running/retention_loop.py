"""Run the retention loop in onnxruntime, as a device would.

Inputs get random values, and what a step retains is fed to the next step. Two models
that differ in nothing but names give the same results, bit by bit. A graph can ask for
any amount of time and memory: :mod:`onnxkvrename.verification.running.isolated_run` runs the
loop in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.verification.running.dim_sizes import list_corrections
from onnxkvrename.verification.running.ort_session import (
    MemoryLimitError,
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


class RunnablePair(NamedTuple):
    """The names of a KV pair, as far as a run needs them.

    Attributes:
        key: Identifies the buffer, whatever token its names have.
        input: The name of its input, if it has one.
        output: The name of its retained output, if it has one.
    """

    key: ValueKey
    input: str | None
    output: str | None


class RunnableModel(NamedTuple):
    """A model to run.

    Attributes:
        path: The file of the model.
        pairs: Its KV pairs.
        byte_size: The bytes of the model and of its external data.
    """

    path: Path
    pairs: Sequence[RunnablePair]
    byte_size: int = 0


class RetentionRun(NamedTuple):
    """The results of a model, step by step.

    Attributes:
        dims: The sizes of the symbols in the shapes of the inputs.
        retained_inputs: For each output that is fed back, the name of its input.
        output_names: The name of each output by its key.
        step_results: The result of each output by its key, for each step.
        unchanged_outputs: The retained outputs that every step left as their inputs
            entered the first.
        findings: What could not be fed back; the loop ends at the step that has any.
    """

    dims: Mapping[str, int]
    retained_inputs: Mapping[str, str]
    output_names: Mapping[ValueKey, str]
    step_results: tuple[Mapping[ValueKey, OutputResult], ...]
    unchanged_outputs: tuple[str, ...]
    findings: tuple[Finding, ...]


def run_retention_loop(
    model: RunnableModel,
    *,
    dims: Mapping[str, int] = MappingProxyType({}),
    likely_dims: Mapping[str, int] = MappingProxyType({}),
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
) -> RetentionRun:
    """Run the loop on one model.

    What is fed follows from the seed, the step and the buffer, so it stays the same
    when names change. If it cannot be run, it is tried again with each size that
    onnxruntime's message asks for, once for each symbol, and last without `likely_dims`.

    Args:
        model: The model to run.
        dims: Sizes for symbolic dimensions, which are kept.
        likely_dims: Sizes for others, to try first; the rest is guessed.
        steps: The number of steps.
        seed: Varies what is fed.

    Raises:
        ModelError: onnxruntime cannot run the model as it is, or its feeds would take
            more than `ort_session.MAX_FEED_BYTES`.
        KvRenameError: onnxruntime is not installed.
    """
    first_error: ModelError | None = None
    pending = [dict(likely_dims), *([{}] if likely_dims else [])]
    corrected_symbols = {*dims}
    while pending:
        sizes = pending.pop(0)
        session = None
        try:
            session = load_session(model.path, _build_keys(model.pairs), {**sizes, **dims})
            return _run_steps(session, model.pairs, steps, seed)
        except MemoryLimitError:
            if not pending:
                raise
        except ModelError as error:
            first_error = first_error or error
            if session is None:
                continue
            message = str(error.__cause__ or error)
            for symbol, size in list_corrections(message, session.dims, corrected_symbols):
                if symbol not in corrected_symbols:
                    corrected_symbols.add(symbol)
                    pending.insert(0, {**session.dims, symbol: size})
    assert first_error is not None
    raise first_error


def _run_steps(
    session: OrtSession, pairs: Sequence[RunnablePair], steps: int, seed: int
) -> RetentionRun:
    retained_inputs = _match_retained_outputs(session, pairs)
    cache_length = _find_cache_length(session, pairs)
    # Feeds are numpy's memory, and an output may share it: keep the first feeds alive.
    first_feeds = {
        value.name: build_feed(session, value, 0, seed=seed, cache_length=cache_length)
        for value in session.inputs
    }
    initial_results = {
        output: digest_value(first_feeds[input_name])
        for output, input_name in retained_inputs.items()
    }
    feeds, results, findings = dict(first_feeds), list[dict[str, OutputResult]](), list[Finding]()
    for step in range(steps):
        outputs = run_step(session, feeds, step)
        results.append({name: digest_value(value) for name, value in outputs.items()})
        findings += _check_feedback(session, retained_inputs, results[-1])
        if findings:
            break
        feeds = {input_name: outputs[output] for output, input_name in retained_inputs.items()}
        feeds |= {
            value.name: build_feed(session, value, step + 1, seed=seed, cache_length=cache_length)
            for value in session.inputs
            if value.name not in feeds
        }
    output_names = {value.key: value.name for value in session.outputs}
    step_results = tuple(
        {key: step[name] for key, name in output_names.items()} for step in results
    )
    unchanged_outputs = tuple(
        name
        for name, initial_result in initial_results.items()
        if all(step[name] == initial_result for step in results)
    )
    return RetentionRun(
        session.dims,
        retained_inputs,
        output_names,
        step_results,
        unchanged_outputs,
        tuple(findings),
    )


def compare_runs(run: RetentionRun, expected: RetentionRun) -> Iterator[Finding]:
    """Yield KV118 where a run differs from the one of the reference.

    Outputs that only one of the two has are named; then the first step that differs,
    by a buffer rather than by the logits.
    """
    for key, name in expected.output_names.items():
        if key not in run.output_names:
            yield build_difference_finding(name, "is an output of the reference only")
    for key, name in run.output_names.items():
        if key not in expected.output_names:
            yield build_difference_finding(name, "is no output of the reference")
    for number, (results, expected_results) in enumerate(
        zip(run.step_results, expected.step_results, strict=False), 1
    ):
        different = [
            key
            for key in expected_results
            if key in results and results[key] != expected_results[key]
        ]
        if different:
            # The key of a buffer has several parts, that of another output only its name.
            key = next((key for key in different if len(key) != 1), different[0])
            difference = _describe_difference(results[key], expected_results[key])
            count = len(different)
            more = f" (one of {count} outputs that differ)" if count > 1 else ""
            message = f"in step {number} {difference}{more}"
            yield build_difference_finding(run.output_names[key], message)
            return


def build_difference_finding(name: str, message: str) -> Finding:
    """Return KV118 for an output that is not as with the reference."""
    hint = "the two differ in more than names: do not use it, and rename the reference again"
    return build_finding("KV118", name, message, hint)


def build_feedback_finding(name: str, message: str) -> Finding:
    """Return KV118 for an output that does not fit the input it is fed back to."""
    hint = "both sides of a buffer share one piece of memory; export the model again"
    return build_finding("KV118", name, message, hint)


def _describe_difference(result: OutputResult, expected: OutputResult) -> str:
    if (result.dtype, result.shape) == (expected.dtype, expected.shape):
        return "holds other values than with the reference"
    return (
        f"is {_format_dtype_and_shape(result)}, "
        f"and not {_format_dtype_and_shape(expected)} as with the reference"
    )


def _format_dtype_and_shape(value: OutputResult | SessionValue) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _build_keys(pairs: Sequence[RunnablePair]) -> dict[str, ValueKey]:
    return {name: pair.key for pair in pairs for name in (pair.input, pair.output) if name}


def _match_retained_outputs(session: OrtSession, pairs: Sequence[RunnablePair]) -> dict[str, str]:
    """Return the input of each output that is fed back: by the pairs, else by its suffix."""
    inputs = {value.name: value for value in session.inputs}
    matches = {pair.output: pair.input for pair in pairs if pair.input and pair.output}
    for output in session.outputs:
        for suffix in _RETAINED_SUFFIXES:
            candidate = inputs.get(output.name.removesuffix(suffix))
            if candidate and output.name not in matches and _can_be_pair(candidate, output):
                matches[output.name] = candidate.name
    return {
        output.name: matches[output.name]
        for output in session.outputs
        if matches.get(output.name) in inputs
    }


def _can_be_pair(candidate: SessionValue, output: SessionValue) -> bool:
    """Tell if values whose names match can be a pair; sizes may be guesses and do not count."""
    return candidate.name != output.name and (candidate.dtype, len(candidate.shape)) == (
        output.dtype,
        len(output.shape),
    )


def _find_cache_length(session: OrtSession, pairs: Sequence[RunnablePair]) -> int:
    """Return the size of the context, or without that symbol the longest axis 2 of a buffer.

    Where an encoder writes buffers, too, the context is that of the decoder.
    """
    buffers = {pair.input for pair in pairs}
    shapes = [value.shape for value in session.inputs if value.name in buffers]
    longest = max((shape[2] for shape in shapes if len(shape) == 4), default=1)
    return session.dims.get("ctx_len", session.dims.get("decoder_ctx_len", longest))


def _check_feedback(
    session: OrtSession, retained_inputs: Mapping[str, str], results: Mapping[str, OutputResult]
) -> Iterator[Finding]:
    """Yield KV118 for outputs that do not fit the inputs they are fed back to."""
    inputs = {value.name: value for value in session.inputs}
    for name, input_name in retained_inputs.items():
        result, value = results[name], inputs[input_name]
        if (result.dtype, result.shape) != (value.dtype, value.shape):
            yield build_feedback_finding(
                name,
                f"comes out as {_format_dtype_and_shape(result)}, "
                f"and cannot go back into {input_name}, {_format_dtype_and_shape(value)}",
            )
