"""A model in onnxruntime: loaded, fed and run, and its refusals in one line."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError

MAX_FEED_BYTES = 1 << 30
"""Bytes that the feeds of one step may take."""

ValueKey = tuple[str, ...]
"""What an input or output is called whatever token it carries: a pair's side by its scope, buffer
and layer, anything else by its name."""

_THREAD_COUNT = 2
_FATAL_LOG_LEVEL = 4
_MAX_PARSED_CHARS = 2000
_MAX_REASON_CHARS = 200
_DEFAULT_DIM_SIZE = 4
"""The size of a dimension of which nothing is known."""


class _FeedType(NamedTuple):
    """How to feed a dtype: by bits drawn from ``low`` up to, but not including, ``high``.

    ``bits`` is the numpy type they are drawn as, ``view`` the one they then
    stand for, if there is one; if not, ``number`` is ONNX's for the dtype.
    """

    bits_dtype: str
    low: int = 0
    high: int = 4
    view_dtype: str = ""
    onnx_type: int = 0

    @property
    def element_size(self) -> int:
        """Bytes of an element."""
        return 1 if self.bits_dtype == "bool" else int(self.bits_dtype.lstrip("uint")) // 8


# Floats lie between 0 and 1, mostly from 1/8: fit for a cache, a temperature, a probability.
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
    """What an output was: two are equal if every bit of them is, NaNs included."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class SessionValue(NamedTuple):
    """An input or output, its dtype in onnxruntime's words, symbols replaced by sizes."""

    name: str
    key: ValueKey
    dtype: str
    shape: tuple[int, ...]

    @property
    def byte_size(self) -> int:
        """In bytes; 0 for what cannot be fed."""
        return (
            math.prod(self.shape) * _FEED_TYPES[self.dtype].element_size
            if self.dtype in _FEED_TYPES
            else 0
        )


class OrtSession(NamedTuple):
    """A model that onnxruntime has loaded; ``dims`` are the sizes of the inputs' symbols."""

    ort: Any
    inference_session: Any
    path: Path
    dims: Mapping[str, int]
    inputs: tuple[SessionValue, ...]
    outputs: tuple[SessionValue, ...]


def load_session(path: Path, keys: Mapping[str, ValueKey], dims: Mapping[str, int]) -> OrtSession:
    """Load a model, with ``dims`` for its symbols, and guesses where they say nothing.

    Raises :class:`ModelError` where onnxruntime refuses it, where it cannot be
    fed, or not within ``LIMIT``; :class:`KvRenameError` without onnxruntime.
    """
    ort = _import_module("onnxruntime")
    _import_module("numpy")
    ort.set_default_logger_severity(_FATAL_LOG_LEVEL)
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_LOG_LEVEL
    options.intra_op_num_threads = _THREAD_COUNT
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    # An optimiser may go by names, and round differently when they change.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        values = (*session.get_inputs(), *session.get_outputs())
        ends = tuple(SessionValue(value.name, (), value.type, value.shape) for value in values)
    except Exception as error:  # onnxruntime's own have no common base
        said = f"onnxruntime cannot load it as it is: {_summarize_error(str(error))}"
        raise ModelError(said, path=str(path)) from None
    count = len(session.get_inputs())
    sizes = _resolve_dim_sizes([end.shape for end in ends[:count]], dims)
    sized = tuple(_resolve_value(end, keys, sizes) for end in ends)
    loaded = OrtSession(ort, session, path, sizes, sized[:count], sized[count:])
    _check_session(loaded)
    return loaded


def build_feed(loaded: OrtSession, into: SessionValue, step: int, *, seed: int, slots: int) -> Any:
    """A value for an input at a step; it follows from these and the key alone.

    ``slots`` is the length of the cache, for the positions. Indices that must lie
    within another input are told by name, as they are in QEfficient's exports.
    """
    numpy = _import_module("numpy")
    kind, last = _FEED_TYPES[into.dtype], into.name.rpartition("/")[2]
    if last == "position_ids" and into.shape:
        array = numpy.broadcast_to(_build_positions(into.shape[-1], step, slots), into.shape)
    elif last == "batch_index":
        array = numpy.arange(math.prod(into.shape)).reshape(into.shape)
    elif last == "image_idx":
        array = numpy.zeros(into.shape)
    else:
        told = repr((seed, step, into.key)).encode("utf-8", "surrogateescape")
        random = numpy.random.default_rng(list(hashlib.sha256(told).digest()))
        bits = random.integers(kind.low, kind.high, into.shape, dtype=kind.bits_dtype)
        if kind.onnx_type:
            return loaded.ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind.onnx_type)
        array = bits.view(kind.view_dtype or kind.bits_dtype)
    array = numpy.array(array, dtype=kind.view_dtype or kind.bits_dtype, order="C")
    return loaded.ort.OrtValue.ortvalue_from_numpy(array)


def run_step(loaded: OrtSession, feeds: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The outputs of one step, by name.

    Raises :class:`ModelError` where onnxruntime cannot run the model.
    """
    options = loaded.ort.RunOptions()
    options.log_severity_level = _FATAL_LOG_LEVEL
    names = [end.name for end in loaded.outputs]
    try:
        values = loaded.inference_session.run_with_ort_values(names, dict(feeds), options)
    except Exception as error:  # onnxruntime's own have no common base
        raise ModelError(
            f"onnxruntime cannot run it as it is: in step {step + 1}, {_summarize_error(str(error))}",
            path=str(loaded.path),
            hint=_suggest_sizes("other", loaded.dims),
        ) from None
    return dict(zip(names, values, strict=True))


def digest_value(value: Any) -> OutputResult:
    """A digest of the bytes where they lie: numpy has no name for some of the dtypes."""
    dtype, shape = value.data_type(), tuple(value.shape())
    size = math.prod(shape) * _FEED_TYPES[dtype].element_size
    held = (ctypes.c_char * size).from_address(value.data_ptr()) if size else b""
    return OutputResult(dtype, shape, hashlib.sha256(held).hexdigest())


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KvRenameError(
            f"{name} cannot be loaded: {error}", hint="pip install 'onnxkvrename[run]'"
        ) from None


def _resolve_dim_sizes(shapes: Iterable[Sequence[Any]], dims: Mapping[str, int]) -> dict[str, int]:
    """A size for every symbol: as given, or guessed, small enough for any machine.

    A window as long as the context holds every position that the context has.
    """
    batch, context = dims.get("batch_size", 1), dims.get("ctx_len", 32)
    known = (("batch", batch), ("seq", 2), ("ctx", context), ("window", context))
    symbols = {dim for shape in shapes for dim in shape if isinstance(dim, str)}
    guesses = {
        symbol: next((size for part, size in known if part in symbol), _DEFAULT_DIM_SIZE)
        for symbol in sorted(symbols)
    }
    return {symbol: dims.get(symbol, guess) for symbol, guess in guesses.items()}


def _resolve_value(
    end: SessionValue, keys: Mapping[str, ValueKey], sizes: Mapping[str, int]
) -> SessionValue:
    shape = tuple(
        dim if isinstance(dim, int) else sizes.get(dim, _DEFAULT_DIM_SIZE) for dim in end.shape
    )
    return SessionValue(end.name, keys.get(end.name, (end.name,)), end.dtype, shape)


def _check_session(loaded: OrtSession) -> None:
    """Refuse what cannot be fed or compared, or would take too much memory."""
    where = str(loaded.path)
    for symbol, size in loaded.dims.items():
        if size < 1:
            raise ModelError(f"{symbol} cannot be {size}", path=where, hint="a size is 1 or more")
    for end in (*loaded.inputs, *loaded.outputs):
        if end.dtype not in _FEED_TYPES:
            raise ModelError(
                f"{end.name} is {end.dtype}: only tensors of numbers can be fed and compared",
                path=where,
            )
    total = sum(end.byte_size for end in loaded.inputs)
    if total > MAX_FEED_BYTES:
        largest = max(loaded.inputs, key=lambda end: end.byte_size)
        raise ModelError(
            f"a step takes {total:,} bytes of feeds, more than {MAX_FEED_BYTES:,}; "
            f"most go into {largest.name} {list(largest.shape)}",
            path=where,
            hint=_suggest_sizes("smaller", loaded.dims),
        )


def _suggest_sizes(which: str, dims: Mapping[str, int]) -> str | None:
    now = ", ".join(f"{symbol}={size}" for symbol, size in dims.items())
    return f"try {which} sizes with --dim NAME=SIZE; these were {now}" if now else None


def _build_positions(count: int, step: int, slots: int) -> list[int]:
    """Where the tokens of a step stand: onwards from step to step, but the last one at the end.

    So every slot of the cache counts as in use. QEfficient gives the others the
    index INT32_MAX, which a device passes over and onnxruntime refuses.
    """
    onwards = range(step * (count - 1), (step + 1) * (count - 1))
    return [*(position % max(1, slots - 1) for position in onwards), slots - 1][:count]


_NOISE_PATTERNS = (
    (r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", ""),
    (r"^Load model from .*? failed: ?", ""),
    (r"\S*onnxruntime/\S+:\d+ .*?\)(?: \[with .*?\])? (?=\S)", ""),
    (r"\w+\.cc:\d+ \w+ ", ""),
    (r"(name |Name:)''", r"\1'(unnamed)'"),
    (r"^Non-zero status code returned while running (\w+) node\. Name:'(.*?)' Status Message: "
     r"(?:.* was false\. )?", r"the \1 node \2 fails: "),
)  # fmt: skip
"""What there is around onnxruntime's own reason: codes, paths, C++ signatures, conditions."""

_EXPLANATIONS = (
    (r"(the \w+ node .*?) fails: .*\b2147483647\b.*",
     r"\1 is given the index INT32_MAX: in QEfficient's exports a cache slot that is not in use, "
     r"which a device passes over and onnxruntime refuses"),
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
"""What some reasons mean."""


def _summarize_error(said: str) -> str:
    """What onnxruntime says, as a part of a line."""
    text = " ".join(said[:_MAX_PARSED_CHARS].split())
    for noise, instead in _NOISE_PATTERNS:
        text = re.sub(noise, instead, text)
    for pattern, meaning in _EXPLANATIONS:
        match = re.fullmatch(pattern, text)
        if match is not None:
            text = match.expand(meaning)
            break
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"
