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
from typing import Any, NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.verification.running.dim_sizes import limit_context_parts, list_corrections
from onnxkvrename.verification.running.feedback import (
    Feedback,
    Step,
    feed_back,
    format_dtype_and_shape,
)
from onnxkvrename.verification.running.ort_session import (
    MemoryLimitError,
    OrtSession,
    OutputResult,
    SessionValue,
    ValueKey,
    build_feed,
    build_flag,
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
        update: How the rules mean it to be updated, empty if they do not say.
    """

    key: ValueKey
    input: str | None
    output: str | None
    update: str = ""


class RunnableModel(NamedTuple):
    """A model to run.

    Attributes:
        path: The file of the model.
        pairs: Its KV pairs.
        byte_size: The bytes of the model and of its external data.
        meanings: What the rules say of symbols.
        branches: Inputs that choose a branch by the step, each with its value in the first one.
    """

    path: Path
    pairs: Sequence[RunnablePair]
    byte_size: int = 0
    meanings: Mapping[str, str] = MappingProxyType({})
    branches: Mapping[str, bool] = MappingProxyType({})


class RetentionRun(NamedTuple):
    """The results of a model, step by step.

    Attributes:
        dims: The sizes of the symbols in the shapes of the inputs.
        retained_inputs: For each output that is fed back, the name of its input.
        keys: The key of each output.
        names: The name of each output, in the same order.
        steps: For each step the results of the outputs, in the same order.
        unchanged_outputs: The retained outputs that every step left as their inputs
            entered the first.
        sized_outputs: Those that every step left as large as their inputs entered the first.
        faults: Outputs that could not be fed back, each with the reason; the loop ends at the
            step that has any.
    """

    dims: Mapping[str, int]
    retained_inputs: Mapping[str, str]
    keys: tuple[ValueKey, ...]
    names: tuple[str, ...]
    steps: tuple[tuple[OutputResult, ...], ...]
    unchanged_outputs: tuple[str, ...]
    sized_outputs: tuple[str, ...]
    faults: tuple[tuple[str, str], ...]

    @property
    def output_names(self) -> Mapping[ValueKey, str]:
        """The name of each output by its key."""
        return dict(zip(self.keys, self.names, strict=True))

    @property
    def step_results(self) -> list[Mapping[ValueKey, OutputResult]]:
        """The result of each output by its key, for each step."""
        return [dict(zip(self.keys, step, strict=True)) for step in self.steps]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """KV118 for each fault."""
        hint = "both sides of a buffer share one piece of memory; export the model again"
        return tuple(build_finding("KV118", *fault, hint) for fault in self.faults)


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

    The `dims` are kept, the `likely_dims` are tried first; other sizes are guessed. The seed varies
    what is fed.

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
            keys, dims_here = _build_keys(model.pairs), {**limit_context_parts(sizes, dims), **dims}
            session = load_session(model.path, keys, dims_here, model.meanings)
            return _run_steps(session, model, steps, seed)
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
                    pending.insert(0, {**sizes, symbol: size})
    assert first_error is not None
    raise first_error


def _run_steps(session: OrtSession, model: RunnableModel, steps: int, seed: int) -> RetentionRun:
    feedback = _match_retained_outputs(session, model.pairs)
    # Feeds are numpy's memory, and an output may share it: keep those of all steps alive.
    feeds = [_build_feeds(session, model, session.dims, 0, seed)]
    initial_results = {each.output: digest_value(feeds[0][each.input]) for each in feedback}
    results, faults, sizes = list[dict[str, OutputResult]](), list[tuple[str, str]](), session.dims
    has_branch = any(value.name in model.branches for value in session.inputs)
    for number in range(steps):
        outputs = run_step(session, feeds[-1], number)
        results.append({name: digest_value(value) for name, value in outputs.items()})
        is_first = number == 0 if has_branch else None
        step = Step(session, sizes, feeds[-1], outputs, results[-1], is_first)
        fed_back = feed_back(step, feedback, model.meanings)
        faults += fed_back.faults
        if faults or fed_back.is_last:
            break
        sizes = fed_back.sizes
        feeds.append({**_build_feeds(session, model, sizes, number + 1, seed), **fed_back.feeds})
    names = tuple(value.name for value in session.outputs)
    unchanged_outputs = tuple(
        name
        for name, initial_result in initial_results.items()
        if all(each[name] == initial_result for each in results)
    )
    sized_outputs = tuple(
        name
        for name, initial_result in initial_results.items()
        if all(each[name].shape == initial_result.shape for each in results)
    )
    return RetentionRun(
        session.dims,
        {each.output: each.input for each in feedback},
        tuple(value.key for value in session.outputs),
        names,
        tuple(tuple(each[name] for name in names) for each in results),
        unchanged_outputs,
        sized_outputs,
        tuple(faults),
    )


def _build_feeds(
    session: OrtSession, model: RunnableModel, sizes: Mapping[str, int], step: int, seed: int
) -> dict[str, Any]:
    """Return a value for each input at a step."""
    values = [value.resize(sizes) for value in session.inputs]
    cache_length = _find_cache_length(values, model.pairs, session.dims)
    return {
        value.name: build_flag(session, value, is_true=model.branches[value.name] == (step == 0))
        if value.name in model.branches and value.dtype == "tensor(bool)"
        else build_feed(session, value, step, seed=seed, cache_length=cache_length)
        for value in values
    }


def compare_runs(run: RetentionRun, expected: RetentionRun) -> Iterator[Finding]:
    """Yield KV118 where a run differs from the one of the reference.

    Outputs that only one of the two has are named; then the first step that differs,
    by a buffer rather than by the logits.
    """
    for key, name in expected.output_names.items():
        if key not in run.output_names:
            yield build_difference_finding(
                name, "is an output of the reference, but not of this model"
            )
    for key, name in run.output_names.items():
        if key not in expected.output_names:
            yield build_difference_finding(
                name, "is an output of this model, but not of the reference"
            )
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
    hint = "the two differ in more than names: do not use this model; rename the reference again"
    return build_finding("KV118", name, message, hint)


def _describe_difference(result: OutputResult, expected: OutputResult) -> str:
    if (result.dtype, result.shape) == (expected.dtype, expected.shape):
        return "has different values from the reference"
    return (
        f"is {format_dtype_and_shape(result)}, "
        f"but {format_dtype_and_shape(expected)} in the reference"
    )


def _build_keys(pairs: Sequence[RunnablePair]) -> dict[str, ValueKey]:
    return {name: pair.key for pair in pairs for name in (pair.input, pair.output) if name}


def _match_retained_outputs(session: OrtSession, pairs: Sequence[RunnablePair]) -> list[Feedback]:
    """Return the outputs that are fed back: by the pairs, else by their suffixes."""
    inputs = {value.name: value for value in session.inputs}
    matches = {
        pair.output: Feedback(pair.output, pair.input, pair.update)
        for pair in pairs
        if pair.input and pair.output
    }
    for output in session.outputs:
        for suffix in _RETAINED_SUFFIXES:
            candidate = inputs.get(output.name.removesuffix(suffix))
            if candidate and output.name not in matches and _can_be_pair(candidate, output):
                matches[output.name] = Feedback(output.name, candidate.name)
    found = (matches.get(output.name) for output in session.outputs)
    return [each for each in found if each is not None and each.input in inputs]


def _can_be_pair(candidate: SessionValue, output: SessionValue) -> bool:
    """Return whether two values can be a pair by dtype and rank; sizes may be guesses."""
    return candidate.name != output.name and (candidate.dtype, len(candidate.shape)) == (
        output.dtype,
        len(output.shape),
    )


def _find_cache_length(
    inputs: Sequence[SessionValue], pairs: Sequence[RunnablePair], dims: Mapping[str, int]
) -> int:
    """Return the size of the context, or without that symbol the longest axis 2 of a buffer.

    Where an encoder writes buffers, too, the context is that of the decoder.
    """
    buffers = {pair.input for pair in pairs}
    shapes = [value.shape for value in inputs if value.name in buffers]
    longest = max((shape[2] for shape in shapes if len(shape) == 4), default=1)
    return dims.get("ctx_len", dims.get("decoder_ctx_len", longest))
