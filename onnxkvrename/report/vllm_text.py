"""A projection onto vLLM for a person: groups, ways of allocation, what a prompt moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnxkvrename.report.manifest_text import format_bytes, format_columns
from onnxkvrename.report.rename_text import escape_unprintable
from onnxkvrename.rules.window_diff import format_layer_numbers, format_layers
from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.projection import Projection
from onnxkvrename.vllm.uniform_specs import KvCacheGroup
from onnxkvrename.vllm.v024 import Allocation

_GROUP_COLUMNS = ("GROUP", "KIND", "LAYERS", "BLOCK", "PAGE")
_ALLOCATION_COLUMNS = ("ALLOCATION", "POSSIBLE", "A BLOCK OF ALL", "PADDING")
_TRANSFER_COLUMNS = ("ALLOCATION", "PROMPT", "REGIONS", "DESCRIPTORS", "BYTES")
_STATE_TEXTS = {"met": "yes", "not met": "no", "requires": "depends"}


def render_projection(projection: Projection | None) -> Iterator[str]:
    """All of it as lines, in columns; then what stands against it, and what it depends on."""
    if projection is not None:
        yield from map(escape_unprintable, _render_lines(projection))


def _render_lines(projection: Projection) -> Iterator[str]:
    asked = projection.request
    yield f"vLLM {asked.vllm_version}, blocks of {asked.block_size}, tensor parallelism {asked.tensor_parallel_size}"
    for refusal in projection.refusals:
        yield f"  refused  {format_layers(refusal.layers)}: {refusal.reason} ({refusal.hint})"
    several = len(set(projection.groupings)) > 1
    for at, grouping in enumerate(projection.groupings if several else projection.groupings[:1]):
        if several:
            yield "  block outermost" if at else "  layer outermost"
        yield from _render_grouping(grouping)
    ways = projection.allocations
    if ways:
        yield from format_columns(
            [
                _ALLOCATION_COLUMNS,
                *_merge_rows((_format_name(way), _format_allocation_row(way)) for way in ways),
            ]
        )
    moves = [(_format_name(way), move) for way in ways for move in _format_transfer_rows(way)]
    if moves:
        yield from format_columns([_TRANSFER_COLUMNS, *_merge_rows(moves)])
    yield from format_columns(
        _merge_rows((_format_name(way), said) for way in ways for said in _list_open_points(way))
    )
    for condition in projection.conditions:
        if condition.state != "met":
            yield f"  {condition.state}  {condition.name}: {condition.why}"


def _merge_rows(rows: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Rows that differ in their names only become one, which begins with all these."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows:
        found.setdefault(row, []).append(name)
    return [(", ".join(names), *row) for row, names in found.items()]


def _render_grouping(grouping: Grouping) -> Iterator[str]:
    if grouping.refusal is not None:
        refusal = grouping.refusal
        yield f"  refused  {format_layers(refusal.layers)}: {refusal.reason} ({refusal.hint})"
    if grouping.groups:
        rows = [_format_group_row(at, group) for at, group in enumerate(grouping.groups)]
        yield from format_columns([_GROUP_COLUMNS, *rows])


def _format_group_row(at: int, group: KvCacheGroup) -> tuple[str, ...]:
    pages = dict.fromkeys(spec.page_size for spec in group.specs)
    windows = {spec.window for spec in group.specs}
    sizes = sorted(str(size) for size in windows if isinstance(size, int))
    unsized = ["of unknown size"] if any(isinstance(size, str) for size in windows) else []
    block = group.first_spec.block_size
    return (
        str(at),
        " ".join((group.kind, *sizes, *unsized)),
        format_layer_numbers(sorted(set(group.layers))),
        "-" if block is None else f"{block:,}",
        ", ".join(map(format_bytes, pages)),
    )


def _format_name(way: Allocation) -> str:
    return f"{way.name} (default)" if way.default else way.name


def _format_allocation_row(way: Allocation) -> tuple[str, ...]:
    share = way.padding_share
    return (
        _STATE_TEXTS[way.state],
        "-" if way.bytes_per_block is None else format_bytes(way.bytes_per_block),
        "-" if share is None else f"{share:.1%}",
    )


def _format_transfer_rows(way: Allocation) -> Iterator[tuple[str, ...]]:
    for move in way.transfers:
        counts = (move.regions, move.descriptors)
        said = ("not known" if count is None else f"{count:,}" for count in counts)
        yield (f"{move.tokens:,}", *said, format_bytes(move.bytes))


def _list_open_points(way: Allocation) -> Iterator[tuple[str, str]]:
    """What is not met; if it is nothing, what must be seen to, and why something is not known."""
    for condition in way.conditions:
        if condition.state == way.state != "met":
            yield condition.state, f"{condition.name}: {condition.why}"
    for reason in dict.fromkeys(move.unknown for move in way.transfers):
        if reason is not None:
            yield "not known", reason
