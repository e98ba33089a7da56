"""Groups whose pages differ in size and stand side by side in a block.

After vLLM 0.24.0, ``v1/core/kv_cache_utils.py`` (``group_and_unify_kv_cache_specs``,
``_get_kv_cache_groups_uniform_groups``), and 0.33.0, ``v1/core/kv_cache_planning.py``
(``_get_packed_kv_cache_groups``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.specs import KvCacheSpec, RefusalError
from onnxkvrename.vllm.uniform_specs import KvCacheGroup, count_most_common_page, is_uniform_type


def choose_group_size(counts: Sequence[int], least: int) -> int:
    """The size of shares, at least ``least``, that pads ``counts`` least; the larger of two."""
    most = max(counts)
    sizes = range(max(1, least), max(most, least, 1) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def build_uniform_groups(specs: Sequence[KvCacheSpec]) -> tuple[KvCacheGroup, ...]:
    """The groups of a model with windowed MLA in 0.24: MLA whole, each window in parts.

    Raises :class:`~onnxkvrename.pages.Refused` where an assertion of vLLM fails.
    """
    whole = [spec for spec in specs if spec.kind == "mla_attention"]
    windows: dict[tuple[object, ...], list[KvCacheSpec]] = {}
    for spec in specs:
        if spec.kind == "sliding_window_mla":
            windows.setdefault((spec.block_size, spec.window), []).append(spec)
    others = [s.layer for s in specs if s.kind not in ("mla_attention", "sliding_window_mla")]
    if others or not whole:
        raise RefusalError(
            others or [spec.layer for spec in specs],
            "vLLM 0.24 takes windowed MLA beside whole MLA, and beside nothing else",
            "a block-outermost layout of vLLM 0.33 may take it",
        )
    counts = [count_most_common_page(group) for group in (whole, *windows.values())]
    size = choose_group_size(counts, counts[0])
    groups = [KvCacheGroup(tuple(whole), has_per_layer_specs=True)]
    for found in windows.values():
        groups += _split_windowed_specs(
            _pad_windowed_specs(found, {spec.page_size for spec in whole}), size
        )
    return tuple(groups)


def build_packed_groups(specs: Sequence[KvCacheSpec]) -> tuple[KvCacheGroup, ...] | None:
    """The groups of a block-outermost layout in 0.33; ``None`` where all pages are of one size."""
    if len({spec.page_size for spec in specs}) <= 1:
        return None
    buckets = _build_buckets(specs)
    least = max(
        (
            count_most_common_page(bucket.specs)
            for bucket in buckets
            if bucket.is_balanced and len(bucket.page_size_counts) > 1
        ),
        default=0,
    )
    counts = [count_most_common_page(bucket.specs) for bucket in buckets if bucket.is_balanced]
    size = choose_group_size(counts, least) if least else None
    anchor = max(_compute_group_bytes(bucket, size) for bucket in buckets)
    groups = list[KvCacheGroup]()
    for bucket in buckets:
        number = _count_groups(bucket, size)
        if _can_split_to_single_layers(bucket, size):
            room = anchor // bucket.specs[0].page_size
            number = max(number, -(-len(bucket.specs) // room))
        groups += _split_by_pattern(bucket.specs, number)
    return tuple(groups)


class _Bucket(NamedTuple):
    """Layers of one type; ``pages`` counts the layers of each size."""

    specs: tuple[KvCacheSpec, ...]
    page_size_counts: dict[int, int]

    @property
    def is_balanced(self) -> bool:
        """Whether there are as many layers of each size."""
        return len(set(self.page_size_counts.values())) == 1


def _build_buckets(specs: Iterable[KvCacheSpec]) -> list[_Bucket]:
    """Each layer in the first bucket that it is of one type with; its first layer says which."""
    found: list[list[KvCacheSpec]] = []
    for spec in specs:
        for bucket in found:
            if is_uniform_type([bucket[0], spec], "0.33"):
                bucket.append(spec)
                break
        else:
            found.append([spec])
    return [_Bucket(tuple(bucket), _count_page_sizes(bucket)) for bucket in found]


def _count_page_sizes(specs: Iterable[KvCacheSpec]) -> dict[int, int]:
    return {page: len(found) for page, found in _group_by_page_size(specs).items()}


def _group_by_page_size(specs: Iterable[KvCacheSpec]) -> dict[int, list[KvCacheSpec]]:
    found: dict[int, list[KvCacheSpec]] = {}
    for spec in specs:
        found.setdefault(spec.page_size, []).append(spec)
    return found


def _count_groups(bucket: _Bucket, size: int | None) -> int:
    """How many groups a bucket makes by the pattern of its pages."""
    if size is None or not bucket.is_balanced:
        return 1
    return -(-count_most_common_page(bucket.specs) // size)


def _can_split_to_single_layers(bucket: _Bucket, size: int | None) -> bool:
    """Whether a bucket may go down to one layer for a group: states, and unsplit windows."""
    kind = bucket.specs[0].kind
    windowed = kind in ("sliding_window", "sliding_window_mla")
    return kind == "mamba" or (size is None and windowed)


def _compute_group_bytes(bucket: _Bucket, size: int | None) -> int:
    """Bytes of the widest group that a bucket cannot do without: of states, one layer's."""
    number = (
        len(bucket.specs)
        if _can_split_to_single_layers(bucket, size)
        else _count_groups(bucket, size)
    )
    return sum(-(-count // number) * page for page, count in bucket.page_size_counts.items())


def _split_by_pattern(specs: Sequence[KvCacheSpec], number: int) -> list[KvCacheGroup]:
    """``number`` groups with as many repeats of the pattern of pages, taken in turn."""
    if number == 1:
        return [KvCacheGroup(tuple(specs), has_per_layer_specs=True)]
    # Of an unbalanced bucket vLLM lets go what has no partner, and then refuses.
    patterns = list(zip(*_group_by_page_size(specs).values(), strict=False))
    if sum(map(len, patterns)) != len(specs):
        raise RefusalError(
            [spec.layer for spec in specs],
            "vLLM splits layers that have pages of several sizes, unevenly many of each",
            "choose a layout that is not block-outermost",
        )
    parts = (patterns[at::number] for at in range(number))
    return [
        KvCacheGroup(tuple(spec for pattern in part for spec in pattern), True) for part in parts
    ]


def _pad_windowed_specs(specs: Sequence[KvCacheSpec], pages: set[int]) -> list[KvCacheSpec]:
    """Windowed layers padded to the next larger page of whole MLA."""
    if max(spec.page_size for spec in specs) > max(pages):
        raise RefusalError(
            [spec.layer for spec in specs],
            "a page of windowed MLA is larger than any of whole MLA",
            "vLLM 0.24 pads windowed pages to whole ones only",
        )
    wider = [min(page for page in pages if page >= spec.page_size) for spec in specs]
    return [
        spec._replace(page_size_padded=page) if page > spec.page_size else spec
        for spec, page in zip(specs, wider, strict=True)
    ]


def _split_windowed_specs(specs: Sequence[KvCacheSpec], size: int) -> list[KvCacheGroup]:
    by_page = _group_by_page_size(specs)
    counts = {len(found) for found in by_page.values()}
    if len(counts) > 1:
        raise RefusalError(
            [spec.layer for spec in specs],
            "windowed MLA has pages of several sizes, unevenly many of each",
            "vLLM 0.24 wants as many layers of each size",
        )
    return _split_by_pattern(specs, -(-counts.pop() // size))
