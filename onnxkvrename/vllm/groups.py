"""Layers into groups, each with one block table, as vLLM forms them.

After ``get_kv_cache_groups`` and what it calls: vLLM 0.24.0,
``v1/core/kv_cache_utils.py``, and 0.33.0, ``v1/core/kv_cache_planning.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from onnxkvrename.layout.kinds import BufferKind
from onnxkvrename.vllm.packing import build_packed_groups, build_uniform_groups
from onnxkvrename.vllm.specs import Condition, KvCacheSpec, Refusal, RefusalError
from onnxkvrename.vllm.uniform_specs import (
    KvCacheGroup,
    build_merge_key,
    build_merged_group,
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
"""How groups came about, by vLLM's own words."""

_UNPADDABLE_KINDS: dict[str, BufferKind] = {"0.24": "mamba", "0.33": "mla_attention"}


class Grouping(NamedTuple):
    """Groups, or why there are none.

    ``group_size`` is the most layers in one, and ``padding_layers`` how many
    are missing for all to have as many.
    """

    method: GroupingMethod
    groups: tuple[KvCacheGroup, ...]
    conditions: tuple[Condition, ...] = ()
    refusal: Refusal | None = None

    @property
    def group_size(self) -> int:
        """The most layers in a group."""
        return max((len(group.specs) for group in self.groups), default=0)

    @property
    def padding_layers(self) -> int:
        """Places for layers that stay empty."""
        return len(self.groups) * self.group_size - sum(len(g.specs) for g in self.groups)

    @property
    def uniform_page_size(self) -> int | None:
        """Bytes of a page, ``None`` where layers have pages of several sizes."""
        pages = {spec.page_size for group in self.groups for spec in group.specs}
        return pages.pop() if len(pages) == 1 else None


def group_layers(
    specs: Sequence[KvCacheSpec], era: str, *, block_outermost: bool = False
) -> Grouping:
    """The groups of a model's layers.

    ``block_outermost`` is about 0.33, where layouts of that kind take pages of
    several sizes.
    """
    if not specs:
        return Grouping("none", ())
    try:
        return _build_grouping(specs, era, block_outermost)
    except RefusalError as error:
        return Grouping("none", (), refusal=error.refusal)


def _build_grouping(specs: Sequence[KvCacheSpec], era: str, block_outermost: bool) -> Grouping:
    if can_merge(specs, era):
        return Grouping(
            "uniform_spec", (build_merged_group(specs),), tuple(_list_merge_conditions(specs))
        )
    if is_uniform_type(specs, era):
        return Grouping("uniform_type", (KvCacheGroup(tuple(specs), has_per_layer_specs=True),))
    _check_windows(specs)
    if era == "0.24" and any(spec.kind == "sliding_window_mla" for spec in specs):
        return Grouping("uniform_groups", build_uniform_groups(specs))
    packed = build_packed_groups(specs) if era == "0.33" and block_outermost else None
    if packed is not None:
        return Grouping("packed", packed)
    try:
        unified, conditions = _unify_page_sizes(specs, era)
    except RefusalError:
        whole = _build_full_allocation_group(specs) if era == "0.33" else None
        if whole is None:
            raise
        return Grouping("full_allocation", (whole,))
    return Grouping("uniform_page_size", _split_into_groups(unified, era), conditions)


def _list_merge_conditions(specs: Sequence[KvCacheSpec]) -> list[Condition]:
    """vLLM merges specs without a look at some sizes, and takes the first one's."""
    pages = sorted({spec.unpadded_page_size for spec in specs})
    if len(pages) == 1:
        return []
    why = f"vLLM merges pages of {' and '.join(map(str, pages))} bytes: all get the first one's"
    return [Condition("one page", "not met", why)]


def _check_windows(specs: Sequence[KvCacheSpec]) -> None:
    """Windows of unknown size may be equal, so that groups depend on them."""
    windows = {spec.window for spec in specs if spec.window is not None}
    unknown = [window for window in windows if isinstance(window, str)]
    if unknown and len(windows) > 1:
        raise RefusalError(
            [spec.layer for spec in specs if isinstance(spec.window, str)],
            f"groups depend on the size of {min(unknown)}",
            f"--dim {min(unknown)}=SIZE says it",
        )


def _unify_page_sizes(
    specs: Sequence[KvCacheSpec], era: str
) -> tuple[tuple[KvCacheSpec, ...], tuple[Condition, ...]]:
    """The specs with pages of one size, the largest.

    A smaller page that divides it gets a larger block; another one is padded,
    in 0.24 if the backend indexes pages by block stride. States have a page of
    their own making: 0.33 pads them, 0.24 does not.
    """
    largest = max(spec.page_size for spec in specs)
    padded = [
        spec for spec in specs if spec.page_size < largest and _needs_padding(spec, largest, era)
    ]
    refused = [spec for spec in padded if spec.kind == _UNPADDABLE_KINDS[era]]
    if refused:
        raise _build_unification_error(refused, largest, era)
    found = tuple(
        spec
        if spec.page_size == largest
        else spec._replace(page_size_padded=largest)
        if _needs_padding(spec, largest, era)
        else _scale_block_size(spec, largest)
        for spec in specs
    )
    if era == "0.33" or not padded:
        return found, ()
    layers = ", ".join(str(spec.layer) for spec in padded)
    why = f"the backend's indexes_kv_by_block_stride: else vLLM refuses to pad layers {layers}"
    return found, (Condition("block stride indexing", "requires", why),)


def _needs_padding(spec: KvCacheSpec, largest: int, era: str) -> bool:
    return spec.kind == "mamba" or largest % spec.page_size != 0


def _scale_block_size(spec: KvCacheSpec, largest: int) -> KvCacheSpec:
    assert spec.block_size is not None
    return spec._replace(block_size=spec.block_size * (largest // spec.page_size))


def _build_unification_error(specs: Sequence[KvCacheSpec], largest: int, era: str) -> RefusalError:
    pages = " and ".join(str(page) for page in sorted({spec.page_size for spec in specs}))
    what = "states cannot be padded" if era == "0.24" else "pages of MLA cannot be padded"
    hint = (
        "vLLM 0.33 pads them"
        if era == "0.24"
        else "choose a block size that makes pages divide, or a block-outermost layout"
    )
    return RefusalError(
        [spec.layer for spec in specs],
        f"pages of {pages} bytes beside {largest}: {what}",
        hint,
    )


def _build_full_allocation_group(specs: Sequence[KvCacheSpec]) -> KvCacheGroup | None:
    """Windows beside MLA as full attention, where their pages cannot be made equal."""
    kinds = {spec.kind for spec in specs}
    if not {"mla_attention", "sliding_window"} <= kinds:
        return None
    whole = tuple(
        spec._replace(kind="full_attention") if spec.kind == "sliding_window" else spec
        for spec in specs
    )
    return KvCacheGroup(whole, has_per_layer_specs=True) if is_uniform_type(whole, "0.33") else None


def _split_into_groups(specs: Sequence[KvCacheSpec], era: str) -> tuple[KvCacheGroup, ...]:
    """Layers of each spec in groups of one size, taken in turn.

    The size is the fewest layers with one spec, or the most where these are
    less than half as many again.
    """
    buckets = _build_buckets(specs, era)
    fewest, most = min(map(len, buckets)), max(map(len, buckets))
    size = most if most < fewest * 1.5 else fewest
    return tuple(
        build_merged_group(bucket[at::number])
        for bucket in buckets
        for number in [-(-len(bucket) // size)]
        for at in range(number)
    )


def _build_buckets(specs: Sequence[KvCacheSpec], era: str) -> list[list[KvCacheSpec]]:
    """Layers with the same spec, in 0.33 with specs that merge."""
    alike: dict[KvCacheSpec, list[KvCacheSpec]] = {}
    for spec in specs:
        alike.setdefault(spec.without_layer, []).append(spec)
    if era == "0.24":
        return list(alike.values())
    found: dict[KvCacheSpec, list[KvCacheSpec]] = {}
    for spec, bucket in alike.items():
        found.setdefault(build_merge_key(spec, era), []).extend(bucket)
    return list(found.values())
