"""Show a projection onto vLLM as text: groups, allocations and transfers of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from onnxkvrename.model.signature import format_shape
from onnxkvrename.report.formats import Line
from onnxkvrename.report.tables import render_facts, render_table, wrap_line
from onnxkvrename.text import format_bytes, format_count, format_layer_numbers, format_layers
from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.memory import Allocation, CanonicalKvCacheRef
from onnxkvrename.vllm.projection import Projection
from onnxkvrename.vllm.specs import (
    VLLM_VERSION,
    KvCacheGroup,
    KvCacheSpec,
    ProjectionRequest,
    find_open_conditions,
)

_GROUP_COLUMNS = ("GROUP", "KIND", "LAYERS", "SPEC", "BLOCK", "BYTES PER PAGE")
_ALLOCATION_COLUMNS = ("ALLOCATION", "POSSIBLE", "BYTES PER BLOCK", "PADDING")
_TRANSFER_COLUMNS = ("ALLOCATION", "PROMPT", "REGIONS", "DESCRIPTORS POSTED", "BYTES")
_VIEW_COLUMNS = ("CanonicalKVCaches (vllm#37853)", "TENSORS (int8)", "GROUP", "GROUP_DATA_REFS")
_POINT_COLUMNS = ("ALLOCATION", "STATE", "WHY")
_INDENT = "  "
_SOURCES = {"canonical": " (vllm#37885)", "packed": " (vllm#46252)"}
"""The pull requests of vLLM that describe an allocation, by its name."""
_STATE_TEXTS = {"met": "yes", "not met": "no", "requires": "depends"}


def render_projection(projection: Projection, width: int | None) -> Iterator[Line]:
    """Yield a projection as lines: groups, allocations, transfers, then what they depend on.

    Args:
        projection: The projection.
        width: The columns of the terminal; `None` for a pipe.
    """
    yield from wrap_line(Line(", ".join(_list_settings(projection.request))), width)
    refusals = (
        ("refused", f"{format_layers(each.layers)}: {each.reason} ({each.hint})")
        for each in projection.refusals
    )
    yield from _render_facts(refusals, width)
    if projection.grouping is not None:
        yield from _render_groups(projection.grouping, width)
    yield from _render_allocations(projection.allocations, width)
    conditions = find_open_conditions(projection.conditions)
    yield from _render_facts(((str(c.state), f"{c.name}: {c.why}") for c in conditions), width)


def _render_facts(facts: Iterable[tuple[str, str]], width: int | None) -> Iterator[Line]:
    return render_facts(list(facts), width, indent=_INDENT)


def _render_table(
    heads: Sequence[str], rows: Iterable[tuple[str, tuple[str, ...]]], width: int | None
) -> Iterator[Line]:
    """Yield the lines of a table; rows that differ in their names only are one with all names."""
    names_by_row: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows:
        names_by_row.setdefault(row, []).append(name)
    merged = [(", ".join(names), *row) for row, names in names_by_row.items()]
    if merged:
        yield from render_table([heads, *merged], width, indent=_INDENT)


def _format_tokens(tokens: int) -> str:
    """Return a number of tokens with its unit: ``1 token``, ``1,024 tokens``."""
    return format_count(tokens, "token")


def _list_settings(request: ProjectionRequest) -> Iterator[str]:
    yield f"vLLM {VLLM_VERSION}"
    yield f"blocks of {_format_tokens(request.block_size)}"
    yield f"tensor parallel size {request.tensor_parallel_size}"
    if request.kv_cache_dtype is not None:
        yield f"KV cache dtype {request.kv_cache_dtype}"
    if request.enable_cross_layers_blocks:
        yield "enable_cross_layers_blocks"


def _render_groups(grouping: Grouping, width: int | None) -> Iterator[Line]:
    rows = [_format_group_row(index, group) for index, group in enumerate(grouping.groups)]
    yield from render_table([_GROUP_COLUMNS, *rows], width, indent=_INDENT)


def _format_group_row(index: int, group: KvCacheGroup) -> tuple[str, ...]:
    page_sizes = dict.fromkeys(spec.page_size for spec in group.specs)
    windows = {spec.window for spec in group.specs}
    sizes = sorted(window for window in windows if isinstance(window, int))
    window_sizes = list(map(_format_tokens, sizes))
    if any(isinstance(window, str) for window in windows):
        window_sizes.append("of unknown size")
    block_size = group.first_spec.block_size
    return (
        str(index),
        " ".join((group.kind, *window_sizes)),
        format_layer_numbers(sorted(set(group.layers))),
        "; ".join(dict.fromkeys(map(_format_spec, group.specs))),
        "-" if block_size is None else _format_tokens(block_size),
        ", ".join(map(format_bytes, page_sizes)),
    )


def _format_spec(spec: KvCacheSpec) -> str:
    """Return what a page of a layer holds: ``8 KV heads of 64, FLOAT16``, or shapes of states."""
    if spec.is_state:
        states = zip(spec.dtypes, spec.state_shapes, strict=True)
        return ", ".join(f"{dtype} {format_shape(shape)}" for dtype, shape in states)
    sizes = dict.fromkeys(size for size in (spec.head_size, spec.head_size_v) if size)
    heads = format_count(spec.kv_heads, "KV head")
    return f"{heads} of {' and '.join(map(str, sizes))}, {spec.dtypes[0]}"


def _render_allocations(allocations: tuple[Allocation, ...], width: int | None) -> Iterator[Line]:
    """Yield allocations, their NIXL transfers, their canonical views, and what these depend on."""
    rows = ((_format_name(each), _format_allocation_row(each)) for each in allocations)
    yield from _render_table(_ALLOCATION_COLUMNS, rows, width)
    possible = tuple(each for each in allocations if each.is_possible)
    rows = ((_format_name(each), row) for each in possible for row in _list_transfer_rows(each))
    yield from _render_table(_TRANSFER_COLUMNS, rows, width)
    rows = ((_format_name(each), row) for each in possible for row in _list_view_rows(each))
    yield from _render_table(_VIEW_COLUMNS, rows, width)
    points = ((_format_name(each), point) for each in allocations for point in _list_points(each))
    yield from _render_table(_POINT_COLUMNS, points, width)


def _format_name(allocation: Allocation) -> str:
    name = allocation.name + _SOURCES.get(allocation.name, "")
    return f"{name} (default)" if allocation.is_default else name


def _format_allocation_row(allocation: Allocation) -> tuple[str, ...]:
    block_bytes, share = allocation.bytes_per_block, allocation.padding_share
    return (
        _STATE_TEXTS[allocation.state],
        "-" if block_bytes is None else format_bytes(block_bytes),
        "-" if share is None else f"{share:.1%}",
    )


def _list_transfer_rows(allocation: Allocation) -> Iterator[tuple[str, ...]]:
    for transfer in allocation.transfers:
        prompt = _format_tokens(transfer.tokens)
        if transfer.refused is not None:
            yield (prompt, *["refused"] * 3)
            continue
        yield (
            prompt,
            _format_count(transfer.regions),
            _format_count(transfer.descriptors),
            format_bytes(transfer.bytes),
        )


def _list_view_rows(allocation: Allocation) -> Iterator[tuple[str, ...]]:
    """Yield one row for all groups with the same references into the CanonicalKVCaches."""
    view = allocation.canonical
    if view is None:
        return
    counts = Counter(view.tensors)
    tensors = ", ".join(f"{count} of (num_blocks, {size:,})" for size, count in counts.items())
    groups: dict[tuple[CanonicalKvCacheRef, ...], list[int]] = {}
    for index, references in enumerate(view.references):
        groups.setdefault(references, []).append(index)
    for references, indexes in groups.items():
        yield tensors, format_layer_numbers(indexes), _format_references(references)


def _format_references(references: Iterable[CanonicalKvCacheRef]) -> str:
    tensors_by_size: dict[int, list[int]] = {}
    for reference in references:
        tensors_by_size.setdefault(reference.page_size, []).append(reference.tensor)
    return "; ".join(
        f"tensor{'s'[: len(tensors) > 1]} {format_layer_numbers(sorted(tensors))}: {size:,} bytes"
        for size, tensors in tensors_by_size.items()
    )


def _format_count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _list_points(allocation: Allocation) -> Iterator[tuple[str, str]]:
    """Yield the conditions that decide, then the limits of NIXL and its transfers."""
    for condition in find_open_conditions(allocation.conditions):
        yield condition.state, f"{condition.name}: {condition.why}"
    registration = allocation.registration
    if registration is not None and registration.refused is not None:
        yield "refused", f"NIXL: {registration.refused}"
    if registration is not None and registration.incomplete is not None:
        yield "incomplete", f"NIXL: {registration.incomplete}"
    for reason in dict.fromkeys(transfer.unknown for transfer in allocation.transfers):
        if reason is not None:
            yield "unknown", reason
