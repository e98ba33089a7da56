"""Projections held against vLLM's own code, from its wheels."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import vllmwheel
from layers import attention, layout, linear, mla
from vllmwheel import DTYPES, Modules

from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.memory import Allocation
from onnxkvrename.vllm.projection import Projection, project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

DRAWN = 1000
BLOCKS = 7
"""The number of blocks, a prime that nothing else is a multiple of."""
REFUSED = (AssertionError, NotImplementedError, ValueError, StopIteration)
"""How vLLM says no; the last one says it where a group would be empty."""


class Layer(NamedTuple):
    """An attention layer or a state, as it is drawn."""

    kind: str
    heads: int
    size: int
    size_v: int
    window: int | None
    states: tuple[tuple[int, ...], ...]
    dtype: str


class Drawn(NamedTuple):
    """An architecture, and how it is asked for."""

    layers: tuple[Layer, ...]
    block_size: int
    tp: int


def drawn(seed: int) -> Drawn:
    """An architecture: a few kinds of layers, repeated, mixed, or in blocks."""
    of = random.Random(seed)
    kinds = of.choice(
        [
            ["full_attention"],
            ["sliding_window"],
            ["mla_attention"],
            ["mamba"],
            ["full_attention", "sliding_window"],
            ["full_attention", "sliding_window"],
            ["full_attention", "mamba"],
            ["mla_attention", "mamba"],
            ["full_attention", "sliding_window", "mamba"],
            ["mla_attention", "sliding_window_mla"],
            ["mla_attention", "sliding_window_mla"],
            ["sliding_window_mla"],
            ["mla_attention", "sliding_window"],
            ["mla_attention", "sliding_window", "sliding_window_mla"],
            ["mla_attention", "full_attention"],
            ["full_attention", "chunked_local_attention"],
            ["chunked_local_attention"],
            ["full_attention", "cross_attention"],
        ]
    )
    dtype = of.choice([*DTYPES])
    alike = of.random() < 0.5
    one = (of.choice([1, 2, 4, 8]), of.choice([64, 80, 128]))
    models = [_layer(of, kind, dtype, one if alike else None) for kind in kinds]
    models += [_layer(of, of.choice(kinds), dtype, one if alike else None)] * of.randint(0, 2)
    count = of.randint(1, 30)
    pattern = of.choice(["turns", "drawn", "runs"])
    chosen = {
        "turns": [models[at % len(models)] for at in range(count)],
        "drawn": [of.choice(models) for _ in range(count)],
        "runs": [models[at * len(models) // count] for at in range(count)],
    }[pattern]
    return Drawn(tuple(chosen), of.choice([16, 64, 128]), of.choice([1, 1, 2, 4, 8]))


def _layer(of: random.Random, kind: str, dtype: str, one: tuple[int, int] | None) -> Layer:
    heads, size = one or (of.choice([1, 2, 4, 6, 8]), of.choice([64, 80, 96, 128, 256]))
    size_v = of.choice([size, size, size, 48])
    if kind in ("cross_attention", "chunked_local_attention"):
        size_v = size
    windowed = kind in ("sliding_window", "sliding_window_mla", "chunked_local_attention")
    window = of.choice([128, 512, 1000]) if windowed else None
    if kind == "mamba":
        states = ((of.choice([512, 1024]), 3), (of.choice([8, 16, 32]), 64, of.choice([64, 128])))
        return Layer(kind, 0, 0, 0, None, states, of.choice(["FLOAT16", "FLOAT"]))
    if "mla" in kind:
        heads, size, size_v = 1, of.choice([256, 512]), of.choice([32, 64])
    return Layer(kind, heads, size, size_v, window, (), dtype)


def as_layout(one: Drawn) -> Layout:
    return layout(*(_buffers(at, layer) for at, layer in enumerate(one.layers)))


def _buffers(at: int, layer: Layer) -> tuple[Buffer, ...]:
    if layer.kind == "mamba":
        return linear(at, *layer.states, dtype=layer.dtype)
    if "mla" in layer.kind:
        return mla(at, layer.size, layer.size_v, layer.window, layer.dtype)
    return attention(
        at, layer.heads, layer.size, layer.size_v, layer.kind, layer.window, layer.dtype
    )


class Witness:
    """vLLM of one version."""

    def __init__(self, version: str) -> None:
        found = vllmwheel.wheel(version)
        if isinstance(found, str):
            pytest.skip(found)
        self.old = version == "0.24.0"
        self.wheel = Modules(found)
        with self.wheel.there():
            import torch
            import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler as scheduler
            import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker as worker
            import vllm.platforms.interface as platforms
            import vllm.v1.kv_cache_interface as interface

            if self.old:
                import vllm.v1.core.kv_cache_utils as planning
            else:
                import vllm.v1.core.kv_cache_planning as planning

                planning.get_hisparse_kv_cache_groups = lambda *_: None
            self.torch, self.specs, self.planning = torch, interface, planning
            self.platform = platforms.Platform
            self.scheduler = scheduler.NixlBaseConnectorScheduler
            self.worker = worker.NixlBaseConnectorWorker

    def spec(
        self, layer: Layer, tp: int, block_size: int, padded: int | None, *, indexed: bool = True
    ) -> Any:
        """What the model's layer would give vLLM."""
        dtype = getattr(self.torch, DTYPES[layer.dtype])
        if layer.kind == "mamba":
            shapes = tuple((shape[0] // tp, *shape[1:]) for shape in layer.states)
            dtypes = (dtype,) * len(shapes)
            return self.specs.MambaSpec(
                block_size=4096, shapes=shapes, dtypes=dtypes, page_size_padded=padded
            )
        is_mla = "mla" in layer.kind
        more: dict[str, Any] = {"num_kv_heads": 1 if is_mla else max(1, layer.heads // tp)}
        more["head_size"] = layer.size + layer.size_v if is_mla else layer.size
        if layer.kind in ("full_attention", "sliding_window"):
            more["head_size_v"] = layer.size_v
        if self.old:
            more["indexes_kv_by_block_stride"] = indexed
        if layer.kind.startswith("sliding"):
            more["sliding_window"] = layer.window
        if layer.kind == "chunked_local_attention":
            more["attention_chunk_size"] = layer.window
        kinds = {
            "full_attention": "FullAttentionSpec",
            "sliding_window": "SlidingWindowSpec",
            "mla_attention": "MLAAttentionSpec",
            "sliding_window_mla": "SlidingWindowMLASpec",
            "chunked_local_attention": "ChunkedLocalAttentionSpec",
            "cross_attention": "CrossAttentionSpec",
        }
        return getattr(self.specs, kinds[layer.kind])(block_size=block_size, dtype=dtype, **more)

    def aligned(self, one: Drawn) -> tuple[int, int | None]:
        """The block size of attention and the padded page of states, by vLLM's platform."""
        states = [layer for layer in one.layers if layer.kind == "mamba"]
        others = [layer for layer in one.layers if layer.kind != "mamba"]
        if not states or not others:
            return one.block_size, None
        largest = max(
            (self.spec(layer, one.tp, 1, None) for layer in states), key=lambda s: s.page_size_bytes
        )
        first = self.spec(others[0], one.tp, 1, None)
        cache = SimpleNamespace(
            cache_dtype="auto",
            block_size=one.block_size,
            mamba_block_size=None,
            user_specified_mamba_block_size=False,
            mamba_cache_mode="none",
            mamba_page_size_padded=None,
            kv_cache_dtype_skip_layers=[],
        )
        model = SimpleNamespace(
            dtype=first.dtype,
            use_mla="mla" in others[0].kind,
            architecture="",
            get_num_kv_heads=lambda _: first.num_kv_heads,
            get_head_size=lambda: first.head_size,
        )
        config = SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None)

        class Model:
            get_mamba_state_shape_from_config = staticmethod(lambda _: largest.shapes)
            get_mamba_state_dtype_from_config = staticmethod(lambda _: largest.dtypes)

        class Backend:
            get_supported_kernel_block_sizes = staticmethod(lambda: [16])
            customize_spec = staticmethod(lambda spec: spec)

        with self.wheel.there():
            import vllm.model_executor.models as models

            models.ModelRegistry = SimpleNamespace(resolve_model_cls=lambda *_, **__: (Model, ""))
            self.platform._find_non_ssm_backends = classmethod(lambda cls, config: [Backend])
            interface = self.specs
            interface.get_kv_quant_mode = lambda _: interface.KVQuantMode.NONE
            self.platform._align_hybrid_block_size(config, Backend)
        return cache.block_size, cache.mamba_page_size_padded

    def named(self, one: Drawn, *, indexed: bool = True) -> dict[str, Any]:
        block_size, padded = self.aligned(one)
        return {
            str(at): self.spec(layer, one.tp, block_size, padded, indexed=indexed)
            for at, layer in enumerate(one.layers)
        }

    def plan(self, one: Drawn, **how: Any) -> Any:
        """vLLM's groups and tensors, or ``None`` where it refuses."""
        config = vllmwheel.config(**how)
        specs = self.named(one)
        with self.wheel.there():
            try:
                groups = self.planning.get_kv_cache_groups(config, dict(specs))
                if sum(len(group.layer_names) for group in groups) != len(specs):
                    return None
                size = self._block(groups, config)
                return self.planning.get_kv_cache_config_from_groups(config, groups, BLOCKS * size)
            except REFUSED:
                return None

    def groups(self, one: Drawn, *, indexed: bool = True, **how: Any) -> Any:
        """vLLM's groups alone, or ``None`` where it refuses."""
        specs = self.named(one, indexed=indexed)
        with self.wheel.there():
            try:
                groups = self.planning.get_kv_cache_groups(vllmwheel.config(**how), dict(specs))
            except REFUSED:
                return None
        if sum(len(group.layer_names) for group in groups) != len(specs):
            return None
        return groups

    def descriptors(self, plan: Any, block_size: int, tokens: int, regions: int) -> list[int]:
        """The blocks of each group that NIXL moves, and how many descriptors these make."""
        config = vllmwheel.config()
        config.cache_config.block_size = block_size
        config.parallel_config.data_parallel_index = _Port()
        config.kv_transfer_config.kv_buffer_device = "cuda"
        config.kv_transfer_config.get_from_extra_config = lambda _, default: default
        groups = plan.kv_cache_groups
        kinds = [_first(group) for group in groups]
        whole = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=kind, layer_names=group.layer_names)
                for kind, group in zip(kinds, groups, strict=True)
            ]
        )
        with self.wheel.there():
            scheduler = self.scheduler(config, "engine", whole)
            states = [hasattr(kind, "shapes") for kind in kinds]
            blocks = tuple(
                [*range(1 if state else -(-tokens // kind.block_size))]
                for kind, state in zip(kinds, states, strict=True)
            )
            clipped = scheduler.get_sw_clipped_blocks(blocks)
            worker = SimpleNamespace(
                num_regions=regions,
                block_len_per_layer=[0] * len(plan.kv_cache_tensors),
                _has_mamba=any(states),
                _group_spec_types=tuple(map(type, kinds)),
            )
            found = self.worker._compute_desc_ids(worker, clipped, 10**6, None, 1)
        return [*map(len, clipped), len(found)]

    def _block(self, groups: Any, config: Any) -> int:
        return int(self.planning._pool_bytes_per_block(config, groups))


class _Port(int):
    """A number that a stand-in can be added to."""

    def __radd__(self, other: Any) -> _Port:
        return self


def _first(group: Any) -> Any:
    spec = group.kv_cache_spec
    return next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))


@pytest.fixture(scope="module")
def old() -> Witness:
    return Witness("0.24.0")


@pytest.fixture(scope="module")
def new() -> Witness:
    return Witness("0.33.0")


def projected(one: Drawn, era: str) -> Projection | None:
    """The projection, ``None`` where a layer cannot be divided or aligned."""
    found = project_layout(as_layout(one), ProjectionRequest(one.block_size, one.tp, era))
    return None if found.refusals else found


def page(group: Any, name: str) -> tuple[int, int, int]:
    """Block size, page and what is no padding of a layer, by vLLM."""
    spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
    plain = (
        sum(
            _product(shape) * dtype.itemsize
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        if hasattr(spec, "shapes")
        else spec.real_page_size_bytes
    )
    states = hasattr(spec, "shapes")
    return 0 if states else spec.block_size, spec.page_size_bytes, plain


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def theirs(groups: Any) -> list[list[tuple[int, int, int, int]]]:
    return [[(int(name), *page(group, name)) for name in group.layer_names] for group in groups]


def ours(grouping: Grouping) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(s.layer, s.block_size or 0, s.page_size, s.unpadded_page_size) for s in group.specs]
        for group in grouping.groups
    ]


def named(found: Projection, name: str) -> Allocation:
    return next(one for one in found.allocations if one.name == name)


def shared(found: Allocation) -> list[tuple[list[int], int, int]]:
    return [
        ([member.layer for member in place.members], place.offset, place.block_stride)
        for place in found.placements
    ]


def test_pages_groups_and_tensors_of_0_24_are_vllms(old: Witness) -> None:
    held = Counter[str]()
    for seed in range(DRAWN):
        one = drawn(seed)
        found = projected(one, "0.24")
        if found is None:
            held["refused before"] += 1
            continue
        (grouping,) = found.groupings
        plan = old.plan(one)
        held[grouping.method] += 1
        if plan is None:
            assert not grouping.groups, one
            continue
        assert theirs(plan.kv_cache_groups) == ours(grouping), one
        assert (old.groups(one, indexed=False) is None) == _wants_indexing(grouping), one
        always = grouping.method == "uniform_groups"
        arranged = named(found, "packed" if always else "unpacked")
        tensors = plan.kv_cache_tensors
        told = [([int(n) for n in t.shared_by], t.offset, t.block_stride) for t in tensors]
        placed = shared(arranged)
        if not always:
            placed = [(layers, offset, 0) for layers, offset, _ in placed]
            sizes = [place.page_size * BLOCKS for place in arranged.placements]
            assert [tensor.size for tensor in tensors] == sizes, one
        assert told == placed, one
    assert held.keys() >= {
        "none",
        "uniform_spec",
        "uniform_type",
        "uniform_groups",
        "uniform_page_size",
    }
    assert sum(held.values()) - held["refused before"] > 0.9 * DRAWN


def _wants_indexing(grouping: Grouping) -> bool:
    return "block stride indexing" in {condition.name for condition in grouping.conditions}


@pytest.mark.parametrize("name", ["unpacked", "packed"])
def test_blocks_and_descriptors_of_0_24_are_nixls(old: Witness, name: str) -> None:
    held = 0
    for seed in range(DRAWN):
        one = drawn(seed)
        tokens = random.Random(seed).choice([1, 127, 128, 129, 5000])
        found = project_layout(
            as_layout(one), ProjectionRequest(one.block_size, one.tp, "0.24", (tokens,))
        )
        arranged = [a for a in found.allocations if a.name == name and a.state != "not met"]
        (transfer,) = arranged[0].transfers if arranged else (None,)
        if transfer is None or transfer.descriptors is None:
            continue
        plan = old.plan(one, cross_layers=name == "packed")
        assert transfer.regions is not None
        told = old.descriptors(plan, one.block_size, tokens, transfer.regions)
        assert told == [*transfer.blocks, transfer.descriptors], one
        held += 1
    assert held > 0.2 * DRAWN


def test_packed_tensors_of_0_24_are_vllms(old: Witness) -> None:
    held = 0
    for seed in range(DRAWN):
        one = drawn(seed)
        found = projected(one, "0.24")
        packed = [a for a in found.allocations if a.name == "packed"] if found else []
        if not packed or packed[0].state == "not met":
            continue
        plan = old.plan(one, cross_layers=True)
        tensors = plan.kv_cache_tensors
        told = [([int(n) for n in t.shared_by], t.offset, t.block_stride) for t in tensors]
        assert told == shared(packed[0]), one
        assert {tensor.size for tensor in tensors} == {BLOCKS * (packed[0].bytes_per_block or 0)}
        held += 1
    assert held > 0.3 * DRAWN


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_pages_groups_and_strides_of_0_33_are_vllms(new: Witness, name: str) -> None:
    held = Counter[str]()
    with new.wheel.there():
        order = new.specs.KVCacheLayout[name]
    for seed in range(DRAWN):
        one = drawn(seed)
        found = projected(one, "0.33")
        if found is None:
            held["refused before"] += 1
            continue
        grouping = found.groupings[int(order.is_block_outermost)]
        held[grouping.method] += 1
        groups = new.groups(one, layout=order)
        assert (groups is None) == (not grouping.groups), one
        if groups is None:
            continue
        assert theirs(groups) == ours(grouping), one
        arranged = named(found, name)
        if _shapes(new, one) > 1 and not order.is_block_compact:
            assert arranged.state == "not met", one
            continue
        plan = new.plan(one, layout=order)
        assert (plan is None) == (arranged.state == "not met"), one
        if plan is not None:
            told = [
                ([int(n) for n in t.layers], t.offset, t.layer_stride, t.block_stride)
                for t in plan.kv_cache_tensors
            ]
            assert told == _strided(arranged), one
            sizes = {tensor.size for tensor in plan.kv_cache_tensors}
            assert sizes == {BLOCKS * (arranged.bytes_per_block or 0)}
    assert sum(held.values()) - held["refused before"] > 0.9 * DRAWN
    assert held.keys() >= {"uniform_spec", "uniform_type", "uniform_page_size"}
    if order.is_block_outermost:
        assert held["packed"] > 0.3 * DRAWN
    else:
        assert held["none"] > 0.05 * DRAWN
        assert held["full_allocation"] > 0.01 * DRAWN


def _shapes(new: Witness, one: Drawn) -> int:
    """How many shapes of pages there are, as vLLM's resolution of the layout counts them."""
    specs = new.named(one).values()
    with new.wheel.there():
        return len({(spec.num_heads, spec.num_states, spec.page_size_bytes) for spec in specs})


def _strided(found: Allocation) -> list[tuple[list[int], int, int, int]]:
    return [
        (
            [member.layer for member in place.members],
            place.offset * (BLOCKS if place.per_block else 1),
            place.layer_stride * (BLOCKS if place.per_block else 1),
            place.block_stride,
        )
        for place in found.placements
    ]
