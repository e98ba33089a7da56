"""The groups that vLLM forms of a model's layers, each with one block table.

This follows ``get_kv_cache_groups`` and the functions that it calls, in
``v1/core/kv_cache_utils.py`` of vLLM 0.24.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.layout.layout import format_size_option
from onnxkvrename.vllm.specs import (
    STATE_KINDS,
    Condition,
    KvCacheGroup,
    KvCacheSpec,
    RefusalError,
    build_merged_group,
    build_requirement,
    can_merge,
    is_uniform_type,
)

GroupingMethod = Literal[
    "uniform_spec",
    "uniform_type",
    "uniform_groups",
    "uniform_page_size",
]
"""The way in which vLLM forms groups, named after its functions."""


class Grouping(NamedTuple):
    """The groups of a model.

    Attributes:
        method: The way in which vLLM forms them.
        groups: The groups, in vLLM's order.
        conditions: The conditions under which vLLM forms these groups with these sizes.
    """

    method: GroupingMethod
    groups: tuple[KvCacheGroup, ...]
    conditions: tuple[Condition, ...] = ()

    @property
    def group_size(self) -> int:
        """The number of layers in the largest group."""
        return max((len(group.specs) for group in self.groups), default=0)

    @property
    def padding_layers(self) -> int:
        """The number of layers to add so that all groups have the same size."""
        layer_count = sum(len(group.specs) for group in self.groups)
        return len(self.groups) * self.group_size - layer_count

    @property
    def uniform_page_size(self) -> int | None:
        """Bytes of a page; ``None`` where layers have pages of several sizes."""
        page_sizes = {spec.page_size for group in self.groups for spec in group.specs}
        return page_sizes.pop() if len(page_sizes) == 1 else None


def group_layers(specs: Sequence[KvCacheSpec]) -> Grouping:
    """Return the groups of a model's layers, in the first of vLLM's ways that fits.

    The specs, at least one, have aligned blocks. This follows the order of
    ``get_kv_cache_groups``.

    Raises:
        RefusalError: No way fits.
    """
    if can_merge(specs):
        merged_group = build_merged_group(specs)
        return Grouping("uniform_spec", (merged_group,), _list_merge_conditions(specs))
    if is_uniform_type(specs):
        return Grouping("uniform_type", (KvCacheGroup(tuple(specs), has_per_layer_specs=True),))
    _check_windows(specs)
    if any(spec.kind == "sliding_window_mla" for spec in specs):
        return Grouping("uniform_groups", _build_uniform_groups(specs))
    unified, conditions = _unify_page_sizes(specs)
    return Grouping("uniform_page_size", _split_into_groups(unified), conditions)


def _list_merge_conditions(specs: Iterable[KvCacheSpec]) -> tuple[Condition, ...]:
    """Return "not met" if vLLM merges pages of several sizes, which it does not compare."""
    page_sizes = sorted({spec.unpadded_page_size for spec in specs})
    if len(page_sizes) == 1:
        return ()
    sizes = " and ".join(map(str, page_sizes))
    why = f"vLLM merges pages of {sizes} bytes: all get the first one's"
    return (Condition("one page", "not met", why),)


def _check_windows(specs: Sequence[KvCacheSpec]) -> None:
    """Refuse a window of unknown size if there is another, which may be equal to it."""
    windows = {spec.window for spec in specs if spec.window is not None}
    unknown = [window for window in windows if isinstance(window, str)]
    if unknown and len(windows) > 1:
        raise RefusalError(
            [spec.layer for spec in specs if isinstance(spec.window, str)],
            f"groups depend on the size of {min(unknown)}",
            f"{format_size_option(min(unknown))} decides it",
        )


def _unify_page_sizes(
    specs: Sequence[KvCacheSpec],
) -> tuple[tuple[KvCacheSpec, ...], tuple[Condition, ...]]:
    """Make all pages as large as the largest one (``unify_kv_cache_spec_page_size``).

    A page that divides the largest gets a larger block. Any other page is padded, if it is
    attention's and the backend indexes pages by block stride.
    """
    largest = max(spec.page_size for spec in specs)
    padded = [spec for spec in specs if spec.page_size < largest and _needs_padding(spec, largest)]
    refused = [spec for spec in padded if spec.kind in STATE_KINDS]
    if refused:
        page_sizes = " and ".join(map(str, sorted({spec.page_size for spec in refused})))
        raise RefusalError(
            [spec.layer for spec in refused],
            f"pages of {page_sizes} bytes beside {largest}: states cannot be padded",
            "no option of vLLM helps",
        )
    unified = tuple(_enlarge_page(spec, largest) for spec in specs)
    if not padded:
        return unified, ()
    layers = ", ".join(str(spec.layer) for spec in padded)
    why = f"the backend's indexes_kv_by_block_stride: else vLLM refuses to pad layers {layers}"
    return unified, (build_requirement("block stride indexing", why),)


def _needs_padding(spec: KvCacheSpec, largest: int) -> bool:
    return spec.is_state or largest % spec.page_size != 0


def _enlarge_page(spec: KvCacheSpec, page_size: int) -> KvCacheSpec:
    if spec.page_size == page_size:
        return spec
    if _needs_padding(spec, page_size):
        return spec._replace(page_size_padded=page_size)
    assert spec.block_size is not None
    return spec._replace(block_size=spec.block_size * (page_size // spec.page_size))


def _split_into_groups(specs: Sequence[KvCacheSpec]) -> tuple[KvCacheGroup, ...]:
    """Distribute the layers of each spec over groups of the same size.

    This follows ``_get_kv_cache_groups_uniform_page_size``. The size is that of the smallest
    bucket, or of the largest one if that is less than half as large again.
    """
    equal: dict[KvCacheSpec, list[KvCacheSpec]] = {}
    for spec in specs:
        equal.setdefault(spec.without_layer, []).append(spec)
    buckets = equal.values()
    fewest, most = min(map(len, buckets)), max(map(len, buckets))
    group_size = most if most < fewest * 1.5 else fewest
    groups = list[KvCacheGroup]()
    for bucket in buckets:
        group_count = -(-len(bucket) // group_size)
        groups += (build_merged_group(bucket[i::group_count]) for i in range(group_count))
    return tuple(groups)


def _build_uniform_groups(specs: Sequence[KvCacheSpec]) -> tuple[KvCacheGroup, ...]:
    """Return the groups of a model with windowed MLA.

    The layers of full MLA are one group. Those of each window are padded to its pages and split.
    This follows ``group_and_unify_kv_cache_specs`` and ``_get_kv_cache_groups_uniform_groups``.

    Raises:
        RefusalError: vLLM fails with an assertion.
    """
    full_mla = [spec for spec in specs if spec.kind == "mla_attention"]
    windows: dict[tuple[object, ...], list[KvCacheSpec]] = {}
    for spec in specs:
        if spec.kind == "sliding_window_mla":
            windows.setdefault((spec.block_size, spec.window), []).append(spec)
    foreign_layers = [
        spec.layer for spec in specs if spec.kind not in ("mla_attention", "sliding_window_mla")
    ]
    if foreign_layers or not full_mla:
        raise RefusalError(
            foreign_layers or [spec.layer for spec in specs],
            "vLLM supports windowed MLA only together with full MLA",
            "no option of vLLM helps",
        )
    counts = [_count_most_common_page(layers) for layers in (full_mla, *windows.values())]
    group_size = _choose_group_size(counts, minimum=counts[0])
    full_page_sizes = {spec.page_size for spec in full_mla}
    groups = [KvCacheGroup(tuple(full_mla), has_per_layer_specs=True)]
    for windowed in windows.values():
        groups += _split_windowed_mla(_pad_windowed_mla(windowed, full_page_sizes), group_size)
    return tuple(groups)


def _choose_group_size(counts: Sequence[int], minimum: int) -> int:
    """Return the group size that pads least when each count is split into groups.

    This is vLLM's ``_approximate_gcd``. The counts are numbers of layers. The size is at least
    `minimum`; of several that pad equally the largest.
    """
    smallest = max(1, minimum)
    sizes = range(smallest, max(smallest, *counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _count_most_common_page(specs: Iterable[KvCacheSpec]) -> int:
    """Return how many layers have the most common page size.

    This is ``get_num_layer_tuples``.
    """
    return max(map(len, _group_by_page_size(specs).values()))


def _group_by_page_size(specs: Iterable[KvCacheSpec]) -> dict[int, list[KvCacheSpec]]:
    groups: dict[int, list[KvCacheSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.page_size, []).append(spec)
    return groups


def _pad_windowed_mla(specs: Sequence[KvCacheSpec], full_page_sizes: set[int]) -> list[KvCacheSpec]:
    """Pad windowed layers to the next larger page of full MLA."""
    if max(spec.page_size for spec in specs) > max(full_page_sizes):
        raise RefusalError(
            [spec.layer for spec in specs],
            "a page of windowed MLA is larger than any of full MLA",
            "vLLM pads windowed pages only to pages of full MLA",
        )
    padded = list[KvCacheSpec]()
    for spec in specs:
        page_size = min(size for size in full_page_sizes if size >= spec.page_size)
        grows = page_size > spec.page_size
        padded.append(spec._replace(page_size_padded=page_size) if grows else spec)
    return padded


def _split_windowed_mla(specs: Sequence[KvCacheSpec], group_size: int) -> list[KvCacheGroup]:
    layer_counts = {len(alike) for alike in _group_by_page_size(specs).values()}
    if len(layer_counts) > 1:
        raise RefusalError(
            [spec.layer for spec in specs],
            "windowed MLA has pages of several sizes with different counts",
            "vLLM requires the same number of layers of each size",
        )
    return _split_by_pattern(specs, -(-layer_counts.pop() // group_size))


def _split_by_pattern(specs: Sequence[KvCacheSpec], group_count: int) -> list[KvCacheGroup]:
    """Distribute the repeats of the pattern over `group_count` groups.

    A repeat has one layer of each page size, of which there are equally many.
    """
    if group_count == 1:
        return [KvCacheGroup(tuple(specs), has_per_layer_specs=True)]
    repeats = list(zip(*_group_by_page_size(specs).values(), strict=True))
    return [
        KvCacheGroup(
            tuple(spec for repeat in repeats[i::group_count] for spec in repeat),
            has_per_layer_specs=True,
        )
        for i in range(group_count)
    ]
