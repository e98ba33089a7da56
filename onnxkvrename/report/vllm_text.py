"""Show a projection onto vLLM as text: groups, allocations and transfers of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from onnxkvrename.findings import (
    format_bytes,
    format_count,
    format_layer_numbers,
    format_layers,
    format_seconds,
)
from onnxkvrename.report.formats import Line
from onnxkvrename.report.tables import render_facts, render_table, wrap_line
from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.memory import Allocation, CanonicalKvCacheRef
from onnxkvrename.vllm.projection import Projection, list_transfer_releases
from onnxkvrename.vllm.reads import PromptReads
from onnxkvrename.vllm.specs import (
    CHUNKED_KINDS,
    ENCODER_KINDS,
    SLIDING_KINDS,
    KvCacheGroup,
    ProjectionRequest,
    Refusal,
    find_open_conditions,
    list_releases,
    list_shown_conditions,
)
from onnxkvrename.vllm.stages import count_gpu_blocks

_GROUP_COLUMNS = ("GROUP", "KIND", "LAYERS", "BLOCK", "BYTES PER PAGE")
_ALLOCATION_COLUMNS = ("ALLOCATION", "POSSIBLE", "BYTES PER BLOCK", "PADDING")
_CAPACITY_COLUMNS = ("ALLOCATION", "REQUEST", "BLOCKS", "BYTES", "REQUESTS THAT FIT")
_STAGE_COLUMNS = ("ALLOCATION", "STAGE", "LAYERS", "BYTES PER BLOCK")
_TRANSFER_COLUMNS = ("ALLOCATION", "PROMPT", "REGIONS", "DESCRIPTORS POSTED", "BYTES")
_VIEW_COLUMNS = ("CanonicalKVCaches", "TENSORS (int8)", "GROUP", "GROUP_DATA_REFS")
_READ_COLUMNS = ("PROMPT", "DECODE", "TRANSFERS", "DESCRIPTORS POSTED", "BYTES")
_POINT_COLUMNS = ("ALLOCATION", "STATE", "WHY")
_INDENT = "  "
_STATE_TEXTS = {"met": "yes", "not met": "no", "requires": "depends"}


def render_projection(projection: Projection | None, width: int | None) -> Iterator[Line]:
    """Yield a projection as lines: groups, allocations, stages, then what they depend on.

    Args:
        projection: The projection; without one there are no lines.
        width: The columns of the terminal; `None` for a pipe.
    """
    if projection is None:
        return
    request = projection.request
    yield from wrap_line(Line(", ".join(_list_settings(request))), width)
    yield from _render_facts(map(_list_refusal, projection.refusals), width)
    yield from _render_groupings(projection.groupings, width)
    yield from _render_allocations(projection.allocations, request, width)
    if len(projection.stages) > 1:
        yield from _render_table(_STAGE_COLUMNS, _list_stage_rows(projection), width)
    points = (
        (_format_name(a), point)
        for a in projection.allocations
        for point in _list_points(a, list_transfer_releases(a, request.vllm_version))
    )
    yield from _render_table(_POINT_COLUMNS, points, width)
    conditions = list_shown_conditions(projection.conditions)
    facts = [(str(c.state), f"{c.name}: {c.why}") for c in conditions]
    if projection.groupings:
        facts.append(("holds for", _format_memory_releases(request)))
        if request.max_model_len is not None or request.bandwidth is not None:
            facts.append(("per token", _format_token_bytes(projection)))
    yield from _render_facts(facts, width)


def _format_token_bytes(projection: Projection) -> str:
    """Return the bytes of a token: ``256 bytes on each rank with fp8, beside …``."""
    stages: dict[int, list[int]] = {}
    for number, size in enumerate(projection.token_bytes):
        stages.setdefault(size, []).append(number)
    dtype = projection.request.kv_cache_dtype
    of_dtype = "" if dtype is None else f" with {dtype}"
    texts = [
        f"{format_bytes(size)} on each rank{_format_stages(numbers) if len(stages) > 1 else ''}"
        for size, numbers in stages.items()
    ]
    return f"{', '.join(texts)}{of_dtype}{_format_others(projection)}"


def _format_stages(numbers: Sequence[int]) -> str:
    return f" of stage{'s'[: len(numbers) > 1]} {format_layer_numbers(numbers)}"


def _format_others(projection: Projection) -> str:
    """Return what else the layers have than what every token adds; empty for nothing."""
    specs = projection.specs
    limited = SLIDING_KINDS | CHUNKED_KINDS | ENCODER_KINDS
    others = {
        "windows": any(spec.kind in limited - ENCODER_KINDS for spec in specs),
        "states": any(spec.is_state for spec in specs),
        "cross attention": any(spec.kind in ENCODER_KINDS for spec in specs),
    }
    names = [name for name, is_there in others.items() if is_there]
    return f", beside {' and '.join(names)}" if names else ""


def _format_memory_releases(request: ProjectionRequest) -> str:
    releases = list_releases(request.vllm_version)
    if request.release in releases:
        return f"vLLM {_format_releases(releases)}: groups and memory"
    return f"vLLM {request.release}: groups and memory, of the allocations above"


def _format_releases(releases: tuple[str, ...]) -> str:
    """Return a range of releases: ``0.33``, ``0.30 to 0.33``."""
    return " to ".join(dict.fromkeys((releases[0], releases[-1])))


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
    is_planned = request.release == request.vllm_version
    planned_as = "" if is_planned else f", planned as {request.vllm_version}"
    yield f"vLLM {request.release}{planned_as}"
    yield f"blocks of {_format_tokens(request.block_size)}"
    yield f"tensor parallel size {request.tensor_parallel_size}"
    if request.pipeline_parallel_size > 1:
        yield f"pipeline parallel size {request.pipeline_parallel_size}"
    if request.draft_start is not None:
        yield f"layers of the draft model from {request.draft_start} on"
    if request.kv_cache_dtype is not None:
        yield f"KV cache dtype {request.kv_cache_dtype}"
    if request.gpu_memory is not None:
        yield f"{format_bytes(request.gpu_memory)} of GPU memory for KV caches"
    if request.bandwidth is not None:
        yield f"{request.bandwidth / 1e9:,.4g} GB/s for each rank"


def _list_refusal(refusal: Refusal) -> tuple[str, str]:
    return "refused", f"{format_layers(refusal.layers)}: {refusal.reason} ({refusal.hint})"


def _render_groupings(groupings: tuple[Grouping, ...], width: int | None) -> Iterator[Line]:
    """Yield each grouping below a heading, or only one where all are equal."""
    headings = ("layer outermost", "block outermost") if len(set(groupings)) > 1 else ("",)
    for heading, grouping in zip(headings, groupings, strict=False):
        if heading:
            yield Line(f"{_INDENT}{heading}")
        if grouping.refusal is not None:
            yield from _render_facts([_list_refusal(grouping.refusal)], width)
        rows = [_format_group_row(index, group) for index, group in enumerate(grouping.groups)]
        if rows:
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
        "-" if block_size is None else _format_tokens(block_size),
        ", ".join(map(format_bytes, page_sizes)),
    )


def _render_allocations(
    allocations: tuple[Allocation, ...], request: ProjectionRequest, width: int | None
) -> Iterator[Line]:
    """Yield the allocations, their NIXL transfers, and their views by the offloading connector."""
    gpu_memory = request.gpu_memory
    heads = _ALLOCATION_COLUMNS if gpu_memory is None else (*_ALLOCATION_COLUMNS, "NUM_BLOCKS")
    rows = ((_format_name(a), _format_allocation_row(a, gpu_memory)) for a in allocations)
    yield from _render_table(heads, rows, width)
    allocations = tuple(a for a in allocations if a.is_possible)
    length, bandwidth = request.max_model_len, request.bandwidth
    rows = ((_format_name(a), row) for a in allocations for row in _list_capacity_rows(a, length))
    yield from _render_table(_CAPACITY_COLUMNS, rows, width)
    columns = _TRANSFER_COLUMNS if bandwidth is None else (*_TRANSFER_COLUMNS, "AT LEAST")
    rows = (
        (_format_name(a), row) for a in allocations for row in _list_transfer_rows(a, bandwidth)
    )
    yield from _render_table(columns, rows, width)
    rows = ((_format_name(a), row) for a in allocations for row in _list_view_rows(a))
    yield from _render_table(_VIEW_COLUMNS, rows, width)


def _format_name(allocation: Allocation) -> str:
    return f"{allocation.name} (default)" if allocation.is_default else allocation.name


def _format_allocation_row(allocation: Allocation, gpu_memory: int | None) -> tuple[str, ...]:
    block_bytes, share = allocation.bytes_per_block, allocation.padding_share
    block_count = count_gpu_blocks(block_bytes, gpu_memory)
    cells = (
        _STATE_TEXTS[allocation.state],
        "-" if block_bytes is None else format_bytes(block_bytes),
        "-" if share is None else f"{share:.1%}",
    )
    if gpu_memory is None:
        return cells
    return (*cells, "-" if block_count is None else f"{block_count:,}")


def _list_stage_rows(projection: Projection) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a row for each stage and each size of its blocks, after an allocation's name."""
    for number, stage in enumerate(projection.stages):
        layers = format_layer_numbers(stage.layers)
        for allocation, size in zip(projection.allocations, stage.bytes_per_block, strict=True):
            if size is not None:
                yield _format_name(allocation), (str(number), layers, format_bytes(size))


def _list_transfer_rows(allocation: Allocation, bandwidth: int | None) -> Iterator[tuple[str, ...]]:
    for transfer in allocation.transfers:
        prompt = _format_tokens(transfer.tokens)
        if transfer.refused is not None:
            yield (prompt, *["refused"] * (3 if bandwidth is None else 4))
            continue
        cells = (
            prompt,
            _format_count(transfer.regions),
            _format_count(transfer.descriptors),
            format_bytes(transfer.bytes),
        )
        seconds = transfer.seconds
        time = "unknown" if seconds is None else format_seconds(seconds)
        yield cells if bandwidth is None else (*cells, time)


def _list_capacity_rows(
    allocation: Allocation, max_model_len: int | None
) -> Iterator[tuple[str, ...]]:
    """Yield what a request of the longest length takes."""
    capacity, block_bytes = allocation.capacity, allocation.bytes_per_block
    if capacity is None or block_bytes is None or max_model_len is None:
        return
    fewest, most = capacity.blocks
    yield (
        _format_tokens(max_model_len),
        _format_range(f"{fewest:,}", f"{most:,}"),
        _format_range(format_bytes(fewest * block_bytes), format_bytes(most * block_bytes)),
        "-" if capacity.requests is None else "{} ({})".format(*capacity.format_requests()),
    )


def _format_range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _list_view_rows(allocation: Allocation) -> Iterator[tuple[str, ...]]:
    """Yield one row for all groups with the same references into the CanonicalKVCaches."""
    view = allocation.canonical
    if not allocation.is_possible:
        return
    if view is None:
        if allocation.placements:
            yield "unknown", "-", "-"
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


def _list_points(allocation: Allocation, releases: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the conditions that decide, then the limits of NIXL and its transfers."""
    list_conditions = list_shown_conditions if allocation.is_possible else find_open_conditions
    for condition in list_conditions(allocation.conditions):
        yield condition.state, f"{condition.name}: {condition.why}"
    if not allocation.is_possible:
        return
    registration = allocation.registration
    if registration is not None and registration.refused is not None:
        yield "refused", f"NIXL: {registration.refused}"
    if registration is not None and registration.incomplete is not None:
        yield "incomplete", f"NIXL: {registration.incomplete}"
    if registration is not None and registration.fewest_blocks > 1:
        yield (
            "requires",
            f"num_blocks: {registration.fewest_blocks:,} or more; --kv-cache-memory-bytes says",
        )
    for reason in dict.fromkeys(transfer.unknown for transfer in allocation.transfers):
        if reason is not None:
            yield "unknown", reason
    if releases:
        yield "holds for", f"vLLM {_format_releases(releases)}: NIXL's regions and transfers"


def render_reads(reads: Iterable[PromptReads], width: int | None) -> Iterator[Line]:
    """Yield a table of what decode posts for each prompt, by ranks that post alike and for all.

    Args:
        reads: What decode posts for each prompt; without any there are no lines.
        width: The columns of the terminal; `None` for a pipe.
    """
    reads = tuple(reads)
    rows = [row for each in reads for row in _list_read_rows(each)]
    if rows:
        yield from render_table([_READ_COLUMNS, *rows], width)
    reasons = dict.fromkeys(each.unknown for each in reads if each.unknown is not None)
    yield from render_facts([("unknown", reason) for reason in reasons], width, indent="")


def _list_read_rows(reads: PromptReads) -> Iterator[tuple[str, ...]]:
    prompt = _format_tokens(reads.tokens)
    if not reads.ranks:
        yield prompt, "-", *["unknown" if reads.refused is None else "fails"] * 3
        return
    ranks_by_figures: dict[tuple[int, int, int], list[int]] = {}
    for rank in reads.ranks:
        figures = (len(rank.sources), rank.descriptors, rank.bytes)
        ranks_by_figures.setdefault(figures, []).append(rank.rank)
    for figures, ranks in ranks_by_figures.items():
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of {format_layer_numbers(ranks)}"
        yield prompt, name, *_format_read_figures(*figures)
    if len(reads.ranks) > 1:
        figures = (reads.transfers, reads.descriptors, reads.bytes)
        yield prompt, "all ranks", *_format_read_figures(*figures)


def _format_read_figures(transfers: int, descriptors: int, size: int) -> tuple[str, str, str]:
    return f"{transfers:,}", f"{descriptors:,}", format_bytes(size)
