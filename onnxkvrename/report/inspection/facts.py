"""What is said about a model beside its map: a name and facts; plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.files.read import is_in_memory
from onnxkvrename.layout.inspect import (
    BufferGroup,
    InspectedBuffer,
    ModelSummary,
    group_buffers,
)
from onnxkvrename.layout.layout import ByteTotals, Sizes, compute_tensor_bytes
from onnxkvrename.model.signature import UNDECLARED, format_dtype, format_shape
from onnxkvrename.report.inert import escape_text, shorten_text
from onnxkvrename.rules.kinds import get_kind_traits
from onnxkvrename.rules.plan import REASON_NOT_RETAINED
from onnxkvrename.text import format_bytes, format_count, format_layers, format_list

_FEW, _SOME = 3, 6
"""Things of a sort that are listed: long ones, and short ones."""
_MAX_NAME = 200
"""Characters of the longest name that stays whole."""
_MAX_GROUPS = 40
"""Groups of alike buffers that are listed."""


class Fact(NamedTuple):
    """A fact with a label; the label is empty where the one before continues."""

    label: str
    lines: tuple[str, ...]


def format_title(summary: ModelSummary) -> str:
    """Return what a model is called: its path, or what its windows have in common."""
    if not summary.windows:
        return summary.path
    name = "" if summary.part is None else summary.part.name.model_name
    model = f" of {name}" if name else ""
    place = f" in {summary.path}" if summary.path else ""
    return f"{len(summary.windows):,} windows{model}{place}"


def format_buffer_bytes(item: InspectedBuffer) -> str:
    """Return the bytes of a buffer, times the symbols of its shape; empty if not known."""
    if item.shape is None or None in item.shape:
        return ""
    fixed = tuple(dim for dim in item.shape if isinstance(dim, int))
    symbols = [dim for dim in item.shape if isinstance(dim, str)]
    count = compute_tensor_bytes(fixed, item.dtype)
    if count is None or (symbols and compute_tensor_bytes((2, *fixed), item.dtype) != 2 * count):
        return ""  # unknown, or with padding that the symbols decide about
    return " \N{MULTIPLICATION SIGN} ".join([format_count(count, "byte"), *symbols])


def format_type(buffer: InspectedBuffer | BufferGroup, sizes: Sizes) -> str:
    """Return the dtype and the shape of a buffer, with each known size next to its symbol."""
    if buffer.shape is None:
        dtype = format_dtype(buffer.dtype)
        return dtype if buffer.dtype == UNDECLARED else f"{dtype} of unknown rank"
    shape = tuple(
        f"{dim}={sizes[dim]}" if isinstance(dim, str) and dim in sizes else dim
        for dim in buffer.shape
    )
    return f"{buffer.dtype} {format_shape(shape)}"


def describe_tokens(summary: ModelSummary) -> str:
    """Return the tokens, with the number of names that have each."""
    total = f"{summary.name_count:,} names"
    tokens = (
        f"{token} on {'all' if count == summary.name_count else f'{count:,} of'} {total}"
        for token, count in summary.token_counts
    )
    return ", ".join(tokens) or "none"


def list_facts(summary: ModelSummary) -> Iterator[Fact]:
    """Yield a label and the lines beside it for each fact."""
    if summary.export is not None:
        export = summary.export
        opsets = ", ".join(f"{domain or 'opset'} {version}" for domain, version in export.opsets)
        producer = f"{export.producer} {export.producer_version}".strip()
        origin = f"{producer or 'an unnamed producer'}; IR {export.ir_version}"
        yield Fact("made by", (f"{origin}, {opsets or 'no opset'}",))
    functions = _format_names(summary.function_names, _FEW)
    nodes = format_count(summary.node_count, "node")
    yield Fact("graph", (nodes + (f", local functions {functions}" if functions else ""),))
    if summary.files:
        yield Fact("external data", ("; ".join(_describe_files(summary)),))
    yield from _list_buffer_facts(summary)
    if summary.buffers:
        yield Fact("token", (describe_tokens(summary),))
    for reason in dict.fromkeys(item.reason for item in summary.kept):
        names = [item.name for item in summary.kept if item.reason == reason]
        text = _format_names(names, _SOME)
        is_output = reason == REASON_NOT_RETAINED
        yield Fact("outputs", (text,)) if is_output else Fact("kept", (f"{reason}: {text}",))


def list_byte_facts(totals: ByteTotals | None) -> Iterator[Fact]:
    """Yield the bytes of all buffers together, as far as they are known."""
    if totals is None:
        return
    token = totals.bytes_per_token
    lines = (
        f"{format_bytes(size)} {what}"
        for size, what in (
            (token.context, "for each token"),
            (token.window, "for each token in a window"),
            (token.encoder, "for each token of the encoder"),
            (totals.state_bytes, "for the states of a sequence"),
            (totals.sequence_bytes, "for a sequence"),
        )
        if size
    )
    yield Fact("KV bytes", tuple(lines))


def _list_buffer_facts(summary: ModelSummary) -> Iterator[Fact]:
    """Yield each group of alike buffers under its kind."""
    if not summary.buffers:
        text = "no KV buffer"
        if summary.feeds:
            count = format_count(len(summary.feeds), "KV buffer")
            text = f"it fills {count} of another model: {_format_names(summary.feeds, _SOME)}"
        yield Fact("buffers", (text,))
        return
    previous_kind = ""
    groups = group_buffers(summary.buffers)
    for group in groups[:_MAX_GROUPS]:
        kind = get_kind_traits(group.kind).label + " (a guess)" * group.kind_guessed
        buffers = (
            f"{_format_names(group.buffers, _SOME)} of {format_layers(sorted(set(group.layers)))}"
        )
        update = f", {group.update.label}" if group.update.label else ""
        label = "" if kind == previous_kind else kind
        yield Fact(label, (buffers, f"{format_type(group, summary.sizes)}{update}"))
        previous_kind = kind
    if len(groups) > _MAX_GROUPS:
        more = f"and {len(groups) - _MAX_GROUPS:,} more groups of buffers; --format json lists all"
        yield Fact("", (more,))


def _describe_files(summary: ModelSummary) -> Iterator[str]:
    usable = [file.location for file in summary.files if file.bytes is not None]
    if usable:
        files = format_count(len(usable), "file")
        names = list(dict.fromkeys(usable))
        if len(names) < len(usable):  # windows in several directories have data of one name
            files += " in several directories"
        size = format_bytes(summary.external_bytes, is_exact=False)
        yield f"{size} in {files}: {_format_names(names, _FEW)}"
    unusable = list(dict.fromkeys(f.location for f in summary.files if f.bytes is None))
    if unusable:
        state = "not read" if is_in_memory(summary.path) else "not usable"
        yield f"{state}: {_format_names(unusable, _FEW)}"


def _format_names(names: Sequence[str], limit: int) -> str:
    """Return the first few names, each without its middle if it is very long."""
    shown = [shorten_text(escape_text(name), _MAX_NAME) for name in names[:limit]]
    return format_list([*shown, *names[limit:]], limit=limit)
