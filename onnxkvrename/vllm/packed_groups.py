"""Form groups whose pages differ in size and are packed side by side in a block.

0.24 forms them for windowed MLA (``group_and_unify_kv_cache_specs`` and
``_get_kv_cache_groups_uniform_groups`` in ``v1/core/kv_cache_utils.py``), 0.33 for every
block-outermost layout (``_get_packed_kv_cache_groups`` in ``v1/core/kv_cache_planning.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.specs import (
    SLIDING_KINDS,
    STATE_KINDS,
    KvCacheGroup,
    KvCacheSpec,
    RefusalError,
    is_uniform_type,
)


def build_uniform_groups(specs: Sequence[KvCacheSpec]) -> tuple[KvCacheGroup, ...]:
    """Return the groups that 0.24 forms of a model with windowed MLA.

    The layers of full MLA are one group. Those of each window are padded to its pages and split.

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
            "vLLM 0.24 supports windowed MLA only together with full MLA",
            "a block-outermost layout of vLLM 0.33 may support it",
        )
    counts = [_count_most_common_page(layers) for layers in (full_mla, *windows.values())]
    group_size = choose_group_size(counts, minimum=counts[0])
    full_page_sizes = {spec.page_size for spec in full_mla}
    groups = [KvCacheGroup(tuple(full_mla), has_per_layer_specs=True)]
    for windowed in windows.values():
        groups += _split_windowed_mla(_pad_windowed_mla(windowed, full_page_sizes), group_size)
    return tuple(groups)


def build_packed_groups(specs: Sequence[KvCacheSpec]) -> tuple[KvCacheGroup, ...] | None:
    """Return the groups that 0.33 forms for a block-outermost layout.

    Layers of one type make a bucket. If a bucket has equally many layers of each of its page sizes,
    they are a pattern that repeats, and the bucket is split into groups of whole repeats.

    ``None`` if all pages have the same size and need no packing.

    Raises:
        RefusalError: vLLM refuses, because its split would lose layers.
    """
    if len({spec.page_size for spec in specs}) <= 1:
        return None
    buckets = _bucket_by_type(specs)
    repeats = _choose_repeats_per_group(buckets)
    block_bytes = max(_compute_widest_group_bytes(bucket, repeats) for bucket in buckets)
    groups = list[KvCacheGroup]()
    for bucket in buckets:
        group_count = _count_groups(bucket, repeats)
        if _is_state_bucket(bucket, repeats):
            # A group with more layers than fit into the block would make the block larger.
            layers_per_block = block_bytes // bucket.specs[0].page_size
            group_count = max(group_count, -(-len(bucket.specs) // layers_per_block))
        groups += _split_by_pattern(bucket.specs, group_count)
    return tuple(groups)


def choose_group_size(counts: Sequence[int], minimum: int) -> int:
    """Return the group size that pads least when each count is split into groups.

    This is vLLM's ``_approximate_gcd``. The counts are numbers of layers, or of repeats of a
    pattern. The size is at least `minimum`; of several that pad equally the largest.
    """
    smallest = max(1, minimum)
    sizes = range(smallest, max(smallest, *counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _count_most_common_page(specs: Iterable[KvCacheSpec]) -> int:
    """Return how many layers have the most common page size.

    This is ``get_num_layer_tuples`` of 0.24 and ``get_max_layers_per_page_size`` of 0.33.
    """
    return max(map(len, _group_by_page_size(specs).values()))


class _Bucket(NamedTuple):
    """Layers of one type, and the number of them with each page size."""

    specs: tuple[KvCacheSpec, ...]
    page_size_counts: dict[int, int]

    @property
    def is_balanced(self) -> bool:
        """True if there are equally many layers of each page size."""
        return len(set(self.page_size_counts.values())) == 1


def _bucket_by_type(specs: Iterable[KvCacheSpec]) -> list[_Bucket]:
    """Put each layer into the first bucket whose first layer has the same type."""
    buckets: list[list[KvCacheSpec]] = []
    for spec in specs:
        for bucket in buckets:
            if is_uniform_type([bucket[0], spec], "0.33"):
                bucket.append(spec)
                break
        else:
            buckets.append([spec])
    return [
        _Bucket(
            tuple(bucket),
            {page_size: len(alike) for page_size, alike in _group_by_page_size(bucket).items()},
        )
        for bucket in buckets
    ]


def _group_by_page_size(specs: Iterable[KvCacheSpec]) -> dict[int, list[KvCacheSpec]]:
    groups: dict[int, list[KvCacheSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.page_size, []).append(spec)
    return groups


def _choose_repeats_per_group(buckets: Iterable[_Bucket]) -> int | None:
    """Return the repeats of a pattern in a group; ``None`` if no bucket mixes page sizes."""
    balanced = [bucket for bucket in buckets if bucket.is_balanced]
    minimum = max(
        (
            _count_most_common_page(bucket.specs)
            for bucket in balanced
            if len(bucket.page_size_counts) > 1
        ),
        default=None,
    )
    if minimum is None:
        return None
    return choose_group_size([_count_most_common_page(b.specs) for b in balanced], minimum)


def _count_groups(bucket: _Bucket, repeats: int | None) -> int:
    """Return into how many groups a bucket's pattern is split (``num_groups_for``)."""
    if repeats is None or not bucket.is_balanced:
        return 1
    return -(-_count_most_common_page(bucket.specs) // repeats)


def _is_state_bucket(bucket: _Bucket, repeats: int | None) -> bool:
    """Return whether groups may have only one layer: states, and windows without a pattern."""
    kind = bucket.specs[0].kind
    return kind in STATE_KINDS or (repeats is None and kind in SLIDING_KINDS)


def _compute_widest_group_bytes(bucket: _Bucket, repeats: int | None) -> int:
    """Return the bytes of the widest group of a bucket that is split as far as possible."""
    group_count = (
        len(bucket.specs) if _is_state_bucket(bucket, repeats) else _count_groups(bucket, repeats)
    )
    return sum(
        -(-count // group_count) * page_size for page_size, count in bucket.page_size_counts.items()
    )


def _split_by_pattern(specs: Sequence[KvCacheSpec], group_count: int) -> list[KvCacheGroup]:
    """Distribute the repeats of the pattern over `group_count` groups.

    A repeat has one layer of each page size.

    Raises:
        RefusalError: The layers are not whole repeats.
    """
    if group_count == 1:
        return [KvCacheGroup(tuple(specs), has_per_layer_specs=True)]
    # Like vLLM's zip, drop the layers of an unbalanced bucket that have no partner.
    repeats = list(zip(*_group_by_page_size(specs).values(), strict=False))
    if sum(map(len, repeats)) != len(specs):
        raise RefusalError(
            [spec.layer for spec in specs],
            "vLLM splits layers that have pages of several sizes with different counts",
            "choose a layout that is not block-outermost",
        )
    return [
        KvCacheGroup(
            tuple(spec for repeat in repeats[i::group_count] for spec in repeat),
            has_per_layer_specs=True,
        )
        for i in range(group_count)
    ]


def _pad_windowed_mla(specs: Sequence[KvCacheSpec], full_page_sizes: set[int]) -> list[KvCacheSpec]:
    """Pad windowed layers to the next larger page of full MLA."""
    if max(spec.page_size for spec in specs) > max(full_page_sizes):
        raise RefusalError(
            [spec.layer for spec in specs],
            "a page of windowed MLA is larger than any of full MLA",
            "vLLM 0.24 pads windowed pages only to pages of full MLA",
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
            "vLLM 0.24 requires the same number of layers of each size",
        )
    return _split_by_pattern(specs, -(-layer_counts.pop() // group_size))
