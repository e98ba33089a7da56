"""The groups that vLLM forms of a model's layers, each with one block table.

This follows ``get_kv_cache_groups`` and the functions that it calls: in
``v1/core/kv_cache_utils.py`` of vLLM 0.24.0, in ``v1/core/kv_cache_planning.py`` of 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.layout.layout import format_size_option
from onnxkvrename.vllm.packed_groups import build_packed_groups, build_uniform_groups
from onnxkvrename.vllm.specs import (
    VERSION_TRAITS,
    Condition,
    KvCacheGroup,
    KvCacheSpec,
    Refusal,
    RefusalError,
    build_merge_key,
    build_merged_group,
    build_requirement,
    can_merge,
    is_uniform_type,
)

GroupingMethod = Literal[
    "none",
    "uniform_spec",
    "uniform_type",
    "uniform_groups",
    "uniform_page_size",
    "packed",
    "full_allocation",
]
"""The way in which vLLM forms groups, named after its functions."""


class Grouping(NamedTuple):
    """The groups of a model, or the reason why there are none.

    Attributes:
        method: The way in which vLLM forms them; ``none`` if it refuses, or if there are no layers.
        groups: The groups, in vLLM's order.
        conditions: The conditions under which vLLM forms these groups with these sizes.
        refusal: Why vLLM refuses to form groups; ``None`` if it does not.
    """

    method: GroupingMethod
    groups: tuple[KvCacheGroup, ...]
    conditions: tuple[Condition, ...] = ()
    refusal: Refusal | None = None

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


def group_layers(
    specs: Sequence[KvCacheSpec], vllm_version: str, *, block_outermost: bool = False
) -> Grouping:
    """Return the groups of a model's layers; if vLLM refuses, the refusal, never an exception.

    The specs have aligned blocks, the version is one of `VLLM_VERSIONS`. With `block_outermost` the
    memory layout has blocks outermost, which lets 0.33 pack pages of several sizes; 0.24 has no
    such layouts.
    """
    if not specs:
        return Grouping("none", ())
    try:
        return _build_grouping(specs, vllm_version, block_outermost)
    except RefusalError as error:
        return Grouping("none", (), refusal=error.refusal)


def _build_grouping(
    specs: Sequence[KvCacheSpec], vllm_version: str, block_outermost: bool
) -> Grouping:
    """Form groups in the first of vLLM's ways that fits, in its order (``get_kv_cache_groups``).

    Raises:
        RefusalError: No way fits.
    """
    if can_merge(specs, vllm_version):
        merged_group = build_merged_group(specs)
        return Grouping("uniform_spec", (merged_group,), _list_merge_conditions(specs))
    if is_uniform_type(specs, vllm_version):
        return Grouping("uniform_type", (KvCacheGroup(tuple(specs), has_per_layer_specs=True),))
    _check_windows(specs)
    if vllm_version == "0.24" and any(spec.kind == "sliding_window_mla" for spec in specs):
        return Grouping("uniform_groups", build_uniform_groups(specs))
    if vllm_version == "0.33" and block_outermost:
        packed_groups = build_packed_groups(specs)
        if packed_groups is not None:
            return Grouping("packed", packed_groups)
    try:
        unified, conditions = _unify_page_sizes(specs, vllm_version)
    except RefusalError:
        fallback = _build_full_allocation_group(specs) if vllm_version == "0.33" else None
        if fallback is None:
            raise
        return Grouping("full_allocation", (fallback,))
    return Grouping("uniform_page_size", _split_into_groups(unified, vllm_version), conditions)


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
    specs: Sequence[KvCacheSpec], vllm_version: str
) -> tuple[tuple[KvCacheSpec, ...], tuple[Condition, ...]]:
    """Make all pages as large as the largest one (``unify_kv_cache_spec_page_size``).

    A page that divides the largest gets a larger block. Any other page is padded: 0.24 pads
    attention only, and only if the backend indexes pages by block stride; 0.33 pads all but MLA.
    """
    largest = max(spec.page_size for spec in specs)
    padded = [spec for spec in specs if spec.page_size < largest and _needs_padding(spec, largest)]
    refused = [
        spec for spec in padded if spec.kind in VERSION_TRAITS[vllm_version].unpaddable_kinds
    ]
    if refused:
        page_sizes = " and ".join(map(str, sorted({spec.page_size for spec in refused})))
        obstacle, hint = VERSION_TRAITS[vllm_version].padding_refusal
        raise RefusalError(
            [spec.layer for spec in refused],
            f"pages of {page_sizes} bytes beside {largest}: {obstacle}",
            hint,
        )
    unified = tuple(_enlarge_page(spec, largest) for spec in specs)
    if vllm_version == "0.33" or not padded:
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


def _build_full_allocation_group(specs: Sequence[KvCacheSpec]) -> KvCacheGroup | None:
    """Put MLA and sliding windows into one group, with windows stored as full attention.

    This follows ``_try_get_full_allocation_fallback_groups`` of 0.33, which vLLM tries if pages
    cannot be unified. ``None`` if vLLM forms no such group.
    """
    if not {"mla_attention", "sliding_window"} <= {spec.kind for spec in specs}:
        return None
    full_specs = tuple(
        spec._replace(kind="full_attention") if spec.kind == "sliding_window" else spec
        for spec in specs
    )
    if not is_uniform_type(full_specs, "0.33"):
        return None
    return KvCacheGroup(full_specs, has_per_layer_specs=True)


def _split_into_groups(specs: Sequence[KvCacheSpec], vllm_version: str) -> tuple[KvCacheGroup, ...]:
    """Distribute the layers of each spec over groups of the same size.

    This follows ``_get_kv_cache_groups_uniform_page_size``. The size is that of the smallest
    bucket, or of the largest one if that is less than half as large again.
    """
    buckets = _bucket_by_spec(specs, vllm_version)
    fewest, most = min(map(len, buckets)), max(map(len, buckets))
    group_size = most if most < fewest * 1.5 else fewest
    groups = list[KvCacheGroup]()
    for bucket in buckets:
        group_count = -(-len(bucket) // group_size)
        groups += (build_merged_group(bucket[i::group_count]) for i in range(group_count))
    return tuple(groups)


def _bucket_by_spec(specs: Iterable[KvCacheSpec], vllm_version: str) -> list[list[KvCacheSpec]]:
    """Collect layers with equal specs; for 0.33, then join buckets whose specs merge."""
    equal: dict[KvCacheSpec, list[KvCacheSpec]] = {}
    for spec in specs:
        equal.setdefault(spec.without_layer, []).append(spec)
    if vllm_version == "0.24":
        return list(equal.values())
    merged: dict[KvCacheSpec, list[KvCacheSpec]] = {}
    for spec, bucket in equal.items():
        merged.setdefault(build_merge_key(spec, vllm_version), []).extend(bucket)
    return list(merged.values())
