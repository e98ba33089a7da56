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

LIMIT = 1 << 30
"""Bytes that the feeds of one step may take."""

Key = tuple[str, ...]
"""What an input or output is called whatever token it carries: a pair's side by its scope, buffer
and layer, anything else by its name."""

_THREADS = 2
_FATAL = 4
_LOOKED_AT = 2000
_LONGEST = 200
_OTHER = 4
"""The size of a dimension of which nothing is known."""


class _Type(NamedTuple):
    """How to feed a dtype: by bits drawn from ``low`` up to, but not including, ``high``.

    ``bits`` is the numpy type they are drawn as, ``view`` the one they then
    stand for, if there is one; if not, ``number`` is ONNX's for the dtype.
    """

    bits: str
    low: int = 0
    high: int = 4
    view: str = ""
    number: int = 0

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return 1 if self.bits == "bool" else int(self.bits.lstrip("uint")) // 8


# Floats lie between 0 and 1, mostly from 1/8: fit for a cache, a temperature, a probability.
_TYPES = {
    "tensor(bool)": _Type("bool", 0, 2),
    **{f"tensor({name})": _Type(name) for name in ("int8", "int16", "int32", "int64")},
    **{f"tensor({name})": _Type(name) for name in ("uint8", "uint16", "uint32", "uint64")},
    "tensor(double)": _Type("uint64", 0x3FC0 << 48, 0x3FF0 << 48, "float64"),
    "tensor(float)": _Type("uint32", 0x3E00 << 16, 0x3F80 << 16, "float32"),
    "tensor(float16)": _Type("uint16", 0x3000, 0x3C00, "float16"),
    "tensor(bfloat16)": _Type("uint16", 0x3E00, 0x3F80, number=16),
    "tensor(float8e4m3fn)": _Type("uint8", 0x28, 0x38, number=17),
    "tensor(float8e4m3fnuz)": _Type("uint8", 0x28, 0x38, number=18),
    "tensor(float8e5m2)": _Type("uint8", 0x28, 0x38, number=19),
    "tensor(float8e5m2fnuz)": _Type("uint8", 0x28, 0x38, number=20),
}


class Result(NamedTuple):
    """What an output was: two are equal if every bit of them is, NaNs included."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class End(NamedTuple):
    """An input or output, its dtype in onnxruntime's words, symbols replaced by sizes."""

    name: str
    key: Key
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes; 0 for what cannot be fed."""
        return math.prod(self.shape) * _TYPES[self.dtype].width if self.dtype in _TYPES else 0


class Session(NamedTuple):
    """A model that onnxruntime has loaded; ``dims`` are the sizes of the inputs' symbols."""

    ort: Any
    session: Any
    path: Path
    dims: Mapping[str, int]
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]


def load(path: Path, keys: Mapping[str, Key], dims: Mapping[str, int]) -> Session:
    """Load a model, with ``dims`` for its symbols, and guesses where they say nothing.

    Raises :class:`ModelError` where onnxruntime refuses it, where it cannot be
    fed, or not within ``LIMIT``; :class:`KvRenameError` without onnxruntime.
    """
    ort = _module("onnxruntime")
    _module("numpy")
    ort.set_default_logger_severity(_FATAL)
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = _THREADS
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    # An optimiser may go by names, and round differently when they change.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        values = (*session.get_inputs(), *session.get_outputs())
        ends = tuple(End(value.name, (), value.type, value.shape) for value in values)
    except Exception as error:  # onnxruntime's own have no common base
        said = f"onnxruntime cannot load it as it is: {_reason(str(error))}"
        raise ModelError(said, path=str(path)) from None
    count = len(session.get_inputs())
    sizes = _sizes([end.shape for end in ends[:count]], dims)
    sized = tuple(_sized(end, keys, sizes) for end in ends)
    loaded = Session(ort, session, path, sizes, sized[:count], sized[count:])
    _judge(loaded)
    return loaded


def feed(loaded: Session, into: End, step: int, *, seed: int, slots: int) -> Any:
    """A value for an input at a step; it follows from these and the key alone.

    ``slots`` is the length of the cache, for the positions. Indices that must lie
    within another input are told by name, as they are in QEfficient's exports.
    """
    numpy = _module("numpy")
    kind, last = _TYPES[into.dtype], into.name.rpartition("/")[2]
    if last == "position_ids" and into.shape:
        array = numpy.broadcast_to(_positions(into.shape[-1], step, slots), into.shape)
    elif last == "batch_index":
        array = numpy.arange(math.prod(into.shape)).reshape(into.shape)
    elif last == "image_idx":
        array = numpy.zeros(into.shape)
    else:
        told = repr((seed, step, into.key)).encode("utf-8", "surrogateescape")
        random = numpy.random.default_rng(list(hashlib.sha256(told).digest()))
        bits = random.integers(kind.low, kind.high, into.shape, dtype=kind.bits)
        if kind.number:
            return loaded.ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind.number)
        array = bits.view(kind.view or kind.bits)
    array = numpy.array(array, dtype=kind.view or kind.bits, order="C")
    return loaded.ort.OrtValue.ortvalue_from_numpy(array)


def run(loaded: Session, feeds: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The outputs of one step, by name.

    Raises :class:`ModelError` where onnxruntime cannot run the model.
    """
    options = loaded.ort.RunOptions()
    options.log_severity_level = _FATAL
    names = [end.name for end in loaded.outputs]
    try:
        values = loaded.session.run_with_ort_values(names, dict(feeds), options)
    except Exception as error:  # onnxruntime's own have no common base
        raise ModelError(
            f"onnxruntime cannot run it as it is: in step {step + 1}, {_reason(str(error))}",
            path=str(loaded.path),
            hint=_hint("other", loaded.dims),
        ) from None
    return dict(zip(names, values, strict=True))


def result(value: Any) -> Result:
    """A digest of the bytes where they lie: numpy has no name for some of the dtypes."""
    dtype, shape = value.data_type(), tuple(value.shape())
    size = math.prod(shape) * _TYPES[dtype].width
    held = (ctypes.c_char * size).from_address(value.data_ptr()) if size else b""
    return Result(dtype, shape, hashlib.sha256(held).hexdigest())


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KvRenameError(
            f"{name} cannot be loaded: {error}", hint="pip install 'onnxkvrename[run]'"
        ) from None


def _sizes(shapes: Iterable[Sequence[Any]], dims: Mapping[str, int]) -> dict[str, int]:
    """A size for every symbol: as given, or guessed, small enough for any machine.

    A window as long as the context holds every position that the context has.
    """
    batch, context = dims.get("batch_size", 1), dims.get("ctx_len", 32)
    known = (("batch", batch), ("seq", 2), ("ctx", context), ("window", context))
    symbols = {dim for shape in shapes for dim in shape if isinstance(dim, str)}
    guesses = {
        symbol: next((size for part, size in known if part in symbol), _OTHER)
        for symbol in sorted(symbols)
    }
    return {symbol: dims.get(symbol, guess) for symbol, guess in guesses.items()}


def _sized(end: End, keys: Mapping[str, Key], sizes: Mapping[str, int]) -> End:
    shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, _OTHER) for dim in end.shape)
    return End(end.name, keys.get(end.name, (end.name,)), end.dtype, shape)


def _judge(loaded: Session) -> None:
    """Refuse what cannot be fed or compared, or would take too much memory."""
    where = str(loaded.path)
    for symbol, size in loaded.dims.items():
        if size < 1:
            raise ModelError(f"{symbol} cannot be {size}", path=where, hint="a size is 1 or more")
    for end in (*loaded.inputs, *loaded.outputs):
        if end.dtype not in _TYPES:
            raise ModelError(
                f"{end.name} is {end.dtype}: only tensors of numbers can be fed and compared",
                path=where,
            )
    total = sum(end.size for end in loaded.inputs)
    if total > LIMIT:
        largest = max(loaded.inputs, key=lambda end: end.size)
        raise ModelError(
            f"a step takes {total:,} bytes of feeds, more than {LIMIT:,}; "
            f"most go into {largest.name} {list(largest.shape)}",
            path=where,
            hint=_hint("smaller", loaded.dims),
        )


def _hint(which: str, dims: Mapping[str, int]) -> str | None:
    now = ", ".join(f"{symbol}={size}" for symbol, size in dims.items())
    return f"try {which} sizes with --dim NAME=SIZE; these were {now}" if now else None


def _positions(count: int, step: int, slots: int) -> list[int]:
    """Where the tokens of a step stand: onwards from step to step, but the last one at the end.

    So every slot of the cache counts as in use. QEfficient gives the others the
    index INT32_MAX, which a device passes over and onnxruntime refuses.
    """
    onwards = range(step * (count - 1), (step + 1) * (count - 1))
    return [*(position % max(1, slots - 1) for position in onwards), slots - 1][:count]


_NOISE = (
    (r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", ""),
    (r"^Load model from .*? failed: ?", ""),
    (r"\S*onnxruntime/\S+:\d+ .*?\)(?: \[with .*?\])? (?=\S)", ""),
    (r"\w+\.cc:\d+ \w+ ", ""),
    (r"(name |Name:)''", r"\1'(unnamed)'"),
    (r"^Non-zero status code returned while running (\w+) node\. Name:'(.*?)' Status Message: "
     r"(?:.* was false\. )?", r"the \1 node \2 fails: "),
)  # fmt: skip
"""What there is around onnxruntime's own reason: codes, paths, C++ signatures, conditions."""

_MEANINGS = (
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


def _reason(said: str) -> str:
    """What onnxruntime says, as a part of a line."""
    text = " ".join(said[:_LOOKED_AT].split())
    for noise, instead in _NOISE:
        text = re.sub(noise, instead, text)
    for pattern, meaning in _MEANINGS:
        match = re.fullmatch(pattern, text)
        if match is not None:
            text = match.expand(meaning)
            break
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
