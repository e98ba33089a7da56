"""Load a model in onnxruntime, feed it and run it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import quote_word
from onnxkvrename.limits import MAX_FEED_BYTES, MAX_MATCHED_CHARS, MAX_REASON_CHARS, shorten_text
from onnxkvrename.verification.running.dim_sizes import (
    DEFAULT_DIM_SIZE,
    read_dims,
    resolve_dim_sizes,
)

ValueKey = tuple[str, ...]
"""Identifies an input or output whatever token its name has: scope, buffer and layer of a pair,
else the name."""

_THREAD_COUNT = 2
_FATAL_LOG_LEVEL = 4

_MEMORY_PATTERN = "bad_?alloc|bad allocation|Failed to allocate memory|Cannot allocate memory"
"""How messages say that there is no more memory."""

_NOISE_PATTERNS = (
    (r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", ""),
    (r"^Load model from .*? failed: ?", ""),
    (r"\S*onnxruntime/\S+:\d+ .*?\)(?: \[with .*?\])? (?=\S)", ""),
    (r"\w+\.cc:\d+ \w+ ", ""),
    (r"(name |Name:)''", r"\1'(unnamed)'"),
    (r"^Non-zero status code returned while running (\w+) node\. Name:'(.*?)' Status Message: "
     r"(?:.* was false\. )?", r"the \1 node \2 fails: "),
)  # fmt: skip
"""Text around onnxruntime's own reason: codes, paths, C++ signatures, conditions."""

_EXPLANATIONS = (
    (r"(the \w+ node .*?) fails: .*\b2147483647\b.*",
     r"\1 is given the index INT32_MAX: in QEfficient's exports a cache slot that is not in use, "
     r"which a device skips and onnxruntime refuses"),
    (r".*?([\w.]+:\w+)\(-?\d+\) is not a registered function/op.*",
     r"neither it nor onnxruntime defines the operator \1"),
    (r".*Error No opset import for domain '(.*)'.*", r"it imports no operator set \1"),
    (r".*No Op registered for (\w+) with domain_version of (\d+).*",
     r"there is no operator \1 in opset \2"),
    (r"Could not find an implementation for (\w+)\((\d+)\) node with name '(.*)'.*",
     r"onnxruntime has no \1 (of opset \2) for the dtypes at node \3"),
    (r".*\(op_type:(\w+).*inconsistent type.*|.*Optype \((\w+)\) bound to different types.*",
     r"a node \1\2 is given dtypes that differ, as in a local function made for FLOAT when the "
     r"model is FLOAT16"),
    (r"Unsupported model IR version: (\d+), max supported IR version: (\d+).*",
     r"it is of IR version \1, and this onnxruntime reads up to \2"),
    (r".*Opset (\d+) is under development.*till opset (\d+).*",
     r"it is of opset \1, and this onnxruntime knows up to \2"),
    (r".*'utf-8' codec can't decode.*",
     r"its names are not all UTF-8, and onnxruntime has no others for Python"),
)  # fmt: skip
"""Plain words for some of the reasons; the first pattern that matches decides."""


class _FeedType(NamedTuple):
    """Settings for random feeds of a dtype.

    Attributes:
        bits_dtype: The numpy dtype in which the bits are drawn.
        low: The lowest value that is drawn.
        high: The end of the range, not drawn itself.
        view_dtype: The numpy dtype that the bits are then viewed as; empty if it is
            `bits_dtype`, or numpy has none.
        onnx_type: ONNX's number of a dtype that numpy does not have, else 0.
    """

    bits_dtype: str
    low: int = 0
    high: int = 4
    view_dtype: str = ""
    onnx_type: int = 0

    @property
    def element_size(self) -> int:
        """The size of an element in bytes."""
        return 1 if self.bits_dtype == "bool" else int(self.bits_dtype.lstrip("uint")) // 8


# Floats are below 1 and mostly from 1/8 on: fit for a cache, a temperature, a probability.
_FEED_TYPES = {
    "tensor(bool)": _FeedType("bool", 0, 2),
    **{f"tensor({name})": _FeedType(name) for name in ("int8", "int16", "int32", "int64")},
    **{f"tensor({name})": _FeedType(name) for name in ("uint8", "uint16", "uint32", "uint64")},
    "tensor(double)": _FeedType("uint64", 0x3FC0 << 48, 0x3FF0 << 48, "float64"),
    "tensor(float)": _FeedType("uint32", 0x3E00 << 16, 0x3F80 << 16, "float32"),
    "tensor(float16)": _FeedType("uint16", 0x3000, 0x3C00, "float16"),
    "tensor(bfloat16)": _FeedType("uint16", 0x3E00, 0x3F80, onnx_type=16),
    "tensor(float8e4m3fn)": _FeedType("uint8", 0x28, 0x38, onnx_type=17),
    "tensor(float8e4m3fnuz)": _FeedType("uint8", 0x28, 0x38, onnx_type=18),
    "tensor(float8e5m2)": _FeedType("uint8", 0x28, 0x38, onnx_type=19),
    "tensor(float8e5m2fnuz)": _FeedType("uint8", 0x28, 0x38, onnx_type=20),
}


class OutputResult(NamedTuple):
    """The result of an output; two are equal if every bit is, NaNs included.

    Attributes:
        dtype: The dtype as onnxruntime writes it, such as `tensor(float16)`.
        shape: The sizes of its dimensions.
        digest: The SHA-256 of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str


class SessionValue(NamedTuple):
    """An input or output of a loaded model.

    Attributes:
        name: Its name.
        key: Its identity, whatever token the name has.
        dtype: The dtype as onnxruntime writes it, such as `tensor(float16)`.
        shape: The sizes of its dimensions, symbols replaced by sizes.
        dims: Its dimensions as the model has them: sizes, symbols and ``None``.
    """

    name: str
    key: ValueKey
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[int | str | None, ...] = ()

    def resize(self, sizes: Mapping[str, int]) -> SessionValue:
        """Return the value with other sizes for its symbols."""
        shape = (
            dim if isinstance(dim, int) else sizes.get(dim or "", DEFAULT_DIM_SIZE)
            for dim in self.dims
        )
        return self._replace(shape=tuple(shape))

    @property
    def byte_size(self) -> int:
        """The size in bytes; 0 for a dtype that cannot be fed."""
        feed_type = _FEED_TYPES.get(self.dtype)
        return 0 if feed_type is None else math.prod(self.shape) * feed_type.element_size


class OrtSession(NamedTuple):
    """A model that onnxruntime has loaded.

    Attributes:
        ort: The module `onnxruntime`.
        inference_session: Its session.
        path: The file of the model.
        dims: The sizes of the symbols in the shapes of the inputs.
        inputs: The inputs in the order of the graph.
        outputs: The outputs in the order of the graph.
    """

    ort: Any
    inference_session: Any
    path: Path
    dims: Mapping[str, int]
    inputs: tuple[SessionValue, ...]
    outputs: tuple[SessionValue, ...]


def load_session(
    path: Path,
    keys: Mapping[str, ValueKey],
    dims: Mapping[str, int],
    meanings: Mapping[str, str] = MappingProxyType({}),
) -> OrtSession:
    """Load a model with onnxruntime.

    The keys are those of some of its inputs and outputs, by name. Sizes that are not in `dims` are
    guessed; the `meanings` are what rules say of symbols.

    Raises:
        ModelError: onnxruntime refuses the model, it cannot be fed, or its feeds
            take more than `MAX_FEED_BYTES`.
        KvRenameError: onnxruntime or numpy is not installed.
    """
    ort, _ = _import_module("onnxruntime"), _import_module("numpy")
    ort.set_default_logger_severity(_FATAL_LOG_LEVEL)
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_LOG_LEVEL
    options.intra_op_num_threads = _THREAD_COUNT
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    # An optimizer may sort by names, and round differently when they change.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # Reading a name that is not UTF-8 fails, too.
        inputs, outputs = (
            [SessionValue(arg.name, (), arg.type, (), read_dims(arg.shape)) for arg in node_args]
            for node_args in (session.get_inputs(), session.get_outputs())
        )
    except Exception as error:  # onnxruntime's own have no common base
        problem = "onnxruntime cannot load it as it is: "
        raise build_ort_error(problem, error, str(path)) from None
    sizes = resolve_dim_sizes([value.dims for value in inputs], dims, meanings)
    loaded = OrtSession(
        ort,
        session,
        path,
        sizes,
        tuple(_resolve_value(value, keys, sizes) for value in inputs),
        tuple(_resolve_value(value, keys, sizes) for value in outputs),
    )
    _check_session(loaded)
    return loaded


def build_feed(
    session: OrtSession, value: SessionValue, step: int, *, seed: int, cache_length: int
) -> Any:
    """Build the value of an input at a step.

    It follows from the seed, the step and the input's key, not from its name.
    Indices that must lie within another input are known by their names in
    QEfficient's exports.

    Args:
        session: The loaded model.
        value: One of its inputs.
        step: The number of the step, from 0.
        seed: Varies what is drawn.
        cache_length: The number of positions that the cache holds.

    Returns:
        An `OrtValue` in the memory of a numpy array. Outputs may share this memory:
        keep the value as long as them.
    """
    numpy = _import_module("numpy")
    feed_type, base_name = _FEED_TYPES[value.dtype], value.name.rpartition("/")[2]
    if base_name == "position_ids" and value.shape:
        positions = _build_positions(value.shape[-1], step, cache_length)
        array = numpy.broadcast_to(positions, value.shape)
    elif base_name == "batch_index":
        array = numpy.arange(math.prod(value.shape)).reshape(value.shape)
    elif base_name == "image_idx":
        array = numpy.zeros(value.shape)
    elif base_name == "attention_mask" and value.dtype in ("tensor(int64)", "tensor(int32)"):
        array = numpy.ones(value.shape)  # some models count the ones to know how long a cache is
    else:
        entropy = repr((seed, step, value.key)).encode("utf-8", "surrogateescape")
        random = numpy.random.default_rng(list(hashlib.sha256(entropy).digest()))
        bits = random.integers(
            feed_type.low, feed_type.high, value.shape, dtype=feed_type.bits_dtype
        )
        if feed_type.onnx_type:
            return session.ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                bits, feed_type.onnx_type
            )
        array = bits.view(feed_type.view_dtype or feed_type.bits_dtype)
    array = numpy.array(array, dtype=feed_type.view_dtype or feed_type.bits_dtype, order="C")
    return session.ort.OrtValue.ortvalue_from_numpy(array)


def build_flag(session: OrtSession, value: SessionValue, *, is_true: bool) -> Any:
    """Return an `OrtValue` for an input that chooses a branch."""
    numpy = _import_module("numpy")
    array = numpy.full(value.shape, is_true, dtype=_FEED_TYPES[value.dtype].bits_dtype)
    return session.ort.OrtValue.ortvalue_from_numpy(array)


def join_positions(session: OrtSession, cache: Any, added: Any, axis: int) -> Any:
    """Return a cache that new positions were appended to, and the oldest ones taken from.

    All three are an `OrtValue` each. The added positions have the size of the cache except for
    `axis`, the axis of the positions.
    """
    numpy = _import_module("numpy")
    feed_type = _FEED_TYPES[cache.data_type()]
    bits = [numpy.frombuffer(_read_bytes(each), feed_type.bits_dtype) for each in (cache, added)]
    arrays = [array.reshape(v.shape()) for array, v in zip(bits, (cache, added), strict=True)]
    joined = numpy.concatenate(arrays, axis=axis)
    length = cache.shape()[axis]
    joined = numpy.take(joined, range(joined.shape[axis] - length, joined.shape[axis]), axis)
    joined = numpy.ascontiguousarray(joined)
    if feed_type.onnx_type:
        return session.ort.OrtValue.ortvalue_from_numpy_with_onnx_type(joined, feed_type.onnx_type)
    return session.ort.OrtValue.ortvalue_from_numpy(
        joined.view(feed_type.view_dtype or joined.dtype)
    )


def run_step(session: OrtSession, feeds: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Run one step and return its outputs by name.

    The feeds are an `OrtValue` for each input, by name. Steps count from 0, for the message of an
    error.

    Raises:
        ModelError: onnxruntime cannot run the model; its cause is onnxruntime's own error.
    """
    options = session.ort.RunOptions()
    options.log_severity_level = _FATAL_LOG_LEVEL
    names = [value.name for value in session.outputs]
    try:
        outputs = session.inference_session.run_with_ort_values(names, dict(feeds), options)
    except Exception as error:  # onnxruntime's own have no common base
        problem = f"onnxruntime cannot run it as it is: in step {step + 1}, "
        hint = _suggest_sizes("other", session.dims)
        raise build_ort_error(problem, error, str(session.path), hint) from error
    return dict(zip(names, outputs, strict=True))


def digest_value(value: Any) -> OutputResult:
    """Return the dtype, the shape and a digest of the bytes of an `OrtValue`.

    The bytes are read in place: numpy does not have all of the dtypes.
    """
    dtype, shape = value.data_type(), tuple(value.shape())
    return OutputResult(dtype, shape, hashlib.sha256(_read_bytes(value)).hexdigest())


def _read_bytes(value: Any) -> Any:
    size = math.prod(value.shape()) * _FEED_TYPES[value.data_type()].element_size
    return (ctypes.c_char * size).from_address(value.data_ptr()) if size else b""


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KvRenameError(
            f"{name} cannot be loaded: {error}", hint=f"`python -m pip install {name}`"
        ) from None


def _resolve_value(
    value: SessionValue, keys: Mapping[str, ValueKey], sizes: Mapping[str, int]
) -> SessionValue:
    """Give a value its key, and sizes for the symbols in its shape."""
    return value.resize(sizes)._replace(key=keys.get(value.name, (value.name,)))


def _check_session(session: OrtSession) -> None:
    """Refuse a model that cannot be fed or compared, or that would take too much memory."""
    path = str(session.path)
    for symbol, size in session.dims.items():
        if size < 1:
            raise ModelError(f"{symbol} cannot be {size}", path=path, hint="a size is 1 or more")
    for value in (*session.inputs, *session.outputs):
        if value.dtype not in _FEED_TYPES:
            raise ModelError(
                f"{value.name} is {value.dtype}: only tensors of numbers can be fed and compared",
                path=path,
            )
    total = sum(value.byte_size for value in session.inputs)
    if total > MAX_FEED_BYTES:
        largest = max(session.inputs, key=lambda value: value.byte_size)
        raise ModelError(
            f"a step takes {total:,} bytes of feeds, more than {MAX_FEED_BYTES:,}; "
            f"most go into {largest.name} {list(largest.shape)}",
            path=path,
            hint=_suggest_sizes("smaller", session.dims),
        )


def _suggest_sizes(adjective: str, dims: Mapping[str, int]) -> str | None:
    sizes = ", ".join(f"{quote_word(symbol)}={size}" for symbol, size in dims.items())
    return f"try {adjective} sizes with --dim NAME=SIZE; these were {sizes}" if sizes else None


def _build_positions(count: int, step: int, cache_length: int) -> list[int]:
    """Return the positions of a step's tokens, which continue from step to step up to the end.

    So every slot of the cache counts as used. QEfficient gives unused slots the index
    INT32_MAX, which a device skips and onnxruntime refuses.
    """
    consecutive = range(step * (count - 1), (step + 1) * (count - 1))
    wrapped = [position % max(1, cache_length - 1) for position in consecutive]
    return [*wrapped, cache_length - 1][:count]


class MemoryLimitError(ModelError):
    """onnxruntime got no more memory."""


def build_ort_error(
    problem: str, error: Exception, path: str, hint: str | None = None
) -> ModelError:
    """Return the error for an exception of onnxruntime, whose reason completes the problem.

    Exceptions of onnxruntime have no common base.
    """
    message = str(error)
    kind = MemoryLimitError if re.search(_MEMORY_PATTERN, message) else ModelError
    return kind(f"{problem}{summarize_ort_error(message)}", path=path, hint=hint)


def summarize_ort_error(message: str) -> str:
    """Return the reason in an error message of onnxruntime, as a part of one line.

    It has at most 200 characters: plain words for a known reason, else onnxruntime's own without
    codes and paths.
    """
    reason = " ".join(message[:MAX_MATCHED_CHARS].split())
    for noise, replacement in _NOISE_PATTERNS:
        reason = re.sub(noise, replacement, reason)
    for pattern, explanation in _EXPLANATIONS:
        match = re.fullmatch(pattern, reason)
        if match is not None:
            reason = match.expand(explanation)
            break
    return shorten_text(reason, MAX_REASON_CHARS)
