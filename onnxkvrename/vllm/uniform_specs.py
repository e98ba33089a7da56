"""Which layers vLLM takes as one: specs that merge, and specs of one type.

After ``merge`` and ``is_uniform_with_collection`` of the specs in
``v1/kv_cache_interface.py``, vLLM 0.24.0 and 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from onnxkvrename.layout.kinds import BufferKind
from onnxkvrename.vllm.specs import KvCacheSpec

_FULL_KINDS = frozenset[BufferKind]({"full_attention", "mla_attention"})
_SLIDING_KINDS = frozenset[BufferKind]({"sliding_window", "sliding_window_mla"})


class KvCacheGroup(NamedTuple):
    """Layers that share one block table.

    A ``mixed`` group keeps the spec of each layer, pages of several sizes among
    them (vLLM's ``UniformTypeKVCacheSpecs``); in others all have the first one's.
    """

    specs: tuple[KvCacheSpec, ...]
    has_per_layer_specs: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, in vLLM's order."""
        return tuple(spec.layer for spec in self.specs)

    @property
    def kind(self) -> BufferKind:
        """The kind of all layers, ``unknown`` for several."""
        kinds = {spec.kind for spec in self.specs}
        return kinds.pop() if len(kinds) == 1 else "unknown"

    @property
    def first_spec(self) -> KvCacheSpec:
        """The spec that stands for the group."""
        return self.specs[0]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the pages of all layers."""
        return sum(spec.page_size for spec in self.specs)


def build_merged_group(specs: Sequence[KvCacheSpec]) -> KvCacheGroup:
    """A group with one spec, the first one's."""
    return KvCacheGroup(
        tuple(specs[0]._replace(layer=spec.layer) for spec in specs), has_per_layer_specs=False
    )


def can_merge(specs: Sequence[KvCacheSpec], era: str) -> bool:
    """Whether specs merge into one."""
    return len({build_merge_key(spec, era) for spec in specs}) == 1


def build_merge_key(spec: KvCacheSpec, era: str) -> KvCacheSpec:
    """What vLLM compares of a spec before it merges: equal for those that merge.

    Not every size counts: in 0.24 neither the value's head of full attention
    nor any size of MLA; of MLA in a window none does.
    """
    if spec.kind == "sliding_window_mla" or (spec.kind == "mla_attention" and era == "0.24"):
        return KvCacheSpec(0, spec.kind, None, 0, 0, 0, spec.window, (), ())
    if spec.kind == "full_attention":
        # A window on full attention does not count here: one is left of all.
        size_v = 0 if era == "0.24" else spec.head_size_v
        spec = spec._replace(head_size_v=size_v, window=None)
    return spec.without_layer


def is_uniform_type(specs: Sequence[KvCacheSpec], era: str) -> bool:
    """Whether specs are of one type: each token takes a slot in all of them, or in none."""
    first, kinds = specs[0], {spec.kind for spec in specs}
    if len({spec.block_size for spec in specs}) > 1:
        return False
    if first.kind in _FULL_KINDS:
        return kinds <= _FULL_KINDS
    if first.kind in _SLIDING_KINDS:
        allowed = _SLIDING_KINDS if first.kind == "sliding_window" else {first.kind}
        return kinds <= allowed and len({spec.window for spec in specs}) == 1
    if first.kind == "chunked_local_attention":
        return len(kinds) == 1 and len({spec.window for spec in specs}) == 1
    if first.kind == "mamba" and era == "0.33":
        return len(kinds) == 1 and len({spec.page_size for spec in specs}) == 1
    return len(kinds) == 1


def count_most_common_page(specs: Sequence[KvCacheSpec]) -> int:
    """How many layers have the page size that most have."""
    return Counter(spec.page_size for spec in specs).most_common(1)[0][1]
