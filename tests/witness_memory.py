"""vLLM's own memory for an architecture: allocated, registered with NIXL and for offloading.

vLLM's runner allocates the tensors, on a CPU, and its connectors' workers register them with an
agent that only takes notes. What they register, which descriptors a prompt posts and which bytes
those cover is read off these notes. Attention backends take blocks undivided.
"""

from __future__ import annotations

import copy
import math
import mmap
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from architectures import Architecture
from vllmwheel import make_config
from witness import REFUSALS, Witness

_LOOK_LIMIT = 1 << 26
"""The most bytes that are looked at."""


class Posted(NamedTuple):
    """What NIXL is asked for.

    Attributes:
        regions: The regions, as vLLM counts them.
        descriptors: The number of descriptors.
        size: Bytes of all descriptors.
        covers_pages: Whether they cover all bytes of the blocks' pages; ``None`` for memory
            that is too much to look at.
    """

    regions: int
    descriptors: int
    size: int
    covers_pages: bool | None


class Memory:
    """The tensors that vLLM allocates for a plan of one architecture."""

    def __init__(
        self,
        witness: MemoryWitness,
        architecture: Architecture,
        plan: Any,
        *,
        cross_layers: bool = False,
        is_cross_layers: bool = False,
    ) -> None:
        self.witness, self.architecture, self.plan = witness, architecture, plan
        self.config = make_config(cross_layers=cross_layers)
        specs = _list_layer_specs(plan)
        self.config.cache_config.block_size = min(
            (spec.block_size for spec in specs.values() if not hasattr(spec, "shapes")),
            default=architecture.block_size,
        )
        self.config.model_config.use_mla = any(
            "MLA" in type(spec).__name__ for spec in specs.values()
        )
        self.config.parallel_config.tensor_parallel_size = architecture.tp
        heads = next((layer.heads for layer in architecture.layers if layer.heads), 8)
        self.config.model_config.get_total_num_kv_heads = lambda: heads
        self.config.layers = {
            name: witness.make_layer(specs[name]) for name in sorted(specs, key=int)
        }
        self.is_cross_layers = is_cross_layers
        if is_cross_layers:
            self.caches = {"0": witness.allocate_cross_layers(plan, self.config)}
        else:
            self.caches = witness.allocate(plan, self.config)

    def register(self, rank: int = 0, engine: str = "engine") -> Any:
        """Return NIXL's worker of `rank` with the caches registered; raise what vLLM raises."""
        nixl = self.witness.nixl
        nixl.get_tensor_model_parallel_rank = lambda: rank
        nixl.get_tensor_model_parallel_world_size = lambda: self.architecture.tp
        with self.witness.modules.importable():
            worker = self.witness.worker_class(self.config, engine, self.plan)
            if self.is_cross_layers:
                worker.register_cross_layers_kv_caches(self.caches["0"])
            else:
                worker.register_kv_caches(self.caches)
        return worker

    def connect(self) -> None:
        """Let the ranks of decode meet those of a prefill like it; raise what vLLM raises."""
        remote = self.register(engine="prefill").xfer_handshake_metadata.agent_metadata_bytes
        ranks = self.architecture.tp
        for rank in range(ranks):
            worker = self.register(rank, "decode")
            with self.witness.modules.importable():
                for remote_rank in worker.transfer_topo.handshake_target_ranks(ranks):
                    # vLLM decodes metadata of its own from each rank, and changes it.
                    meta = SimpleNamespace(**copy.deepcopy(vars(remote)))
                    worker.add_remote_agent(meta, remote_rank, ranks)

    def post(self, worker: Any, block_ids: tuple[list[int], ...]) -> Posted:
        """Return what `worker` posts for blocks of each group."""
        ids = worker._compute_desc_ids(block_ids, worker.num_blocks, None, 1)
        ids = np.asarray(ids, np.int64)
        starts, sizes = _expand_descriptors(worker.src_blocks_data)
        return Posted(
            worker.num_regions,
            len(ids),
            int(sizes[ids].sum()),
            self._covers_pages(starts[ids], sizes[ids], block_ids),
        )

    def _covers_pages(
        self, starts: Any, sizes: Any, block_ids: tuple[list[int], ...]
    ) -> bool | None:
        """Return whether the descriptors cover all data of the groups' blocks."""
        if self.is_cross_layers or sizes.sum() > _LOOK_LIMIT:
            return None
        storages = {
            storage.data_ptr(): torch.tensor([], dtype=torch.int8).set_(storage)
            for cache in self.caches.values()
            for storage in [_list_tensors(cache)[0].untyped_storage()]
        }
        bases = np.array(sorted(storages))
        posted = []
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            base = int(bases[np.searchsorted(bases, start, side="right") - 1])
            posted.append(storages[base][start - base : start - base + size])
        for part in posted:
            part.fill_(1)
        covers = all(
            bool(page.view(torch.int8).all())
            for group, ids in zip(self.plan.kv_cache_groups, block_ids, strict=True)
            for name in group.layer_names
            for tensor in _list_tensors(self.caches[name])
            for page in [tensor[ids]]
        )
        for part in posted:
            part.zero_()
        return covers

    def list_blocks(
        self, prompt_length: int
    ) -> tuple[tuple[list[int], ...], tuple[list[int], ...]]:
        """Return the blocks of a prompt that prefill offers, and those that decode reads."""
        return self.witness.list_blocks(self.plan, self.config, prompt_length)

    def build_canonical_view(self) -> tuple[list[int], list[list[tuple[int, int]]]] | str:
        """Return the offloading connector's tensors and references, or why it refuses."""
        views: list[Any] = []
        spec = SimpleNamespace(get_worker=views.append, kv_cache_config=self.plan)
        with self.witness.modules.importable():
            try:
                worker = self.witness.offloading(spec)
                worker._register_handlers = views.append
                if self.is_cross_layers:
                    backend = next(iter(self.config.layers.values())).get_attn_backend()
                    worker.register_cross_layers_kv_cache(self.caches["0"], backend)
                else:
                    worker.register_kv_caches(self.caches)
            except (*REFUSALS, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
        (view,) = views
        for tensor in view.tensors:
            assert tensor.tensor.shape == (self.plan.num_blocks, tensor.page_size_bytes)
        return (
            [tensor.page_size_bytes for tensor in view.tensors],
            [
                [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
                for refs in view.group_data_refs
            ],
        )


class MemoryWitness(Witness):
    """vLLM with its runner's allocation and its connectors."""

    can_allocate = True

    def __init__(self) -> None:
        super().__init__()
        with self.modules.importable():
            import vllm.config as config
            import vllm.distributed.nixl_utils as nixl
            import vllm.envs as envs
            import vllm.v1.attention.backends.utils as backend_utils

            envs.VLLM_BATCH_INVARIANT = False
            envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL = None
            config.get_layers_from_vllm_config = _list_layers
            nixl.NixlWrapper, nixl.nixl_agent_config = _Agent, None
            backend_utils.get_kv_cache_layout = lambda: "HND"

            import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler as scheduler
            import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker as worker
            import vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker as puller
            import vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker as offloading
            import vllm.model_executor.layers.attention.mla_attention as mla
            import vllm.v1.attention.backend as backend
            import vllm.v1.attention.backends.flash_attn as flash
            import vllm.v1.attention.backends.flash_attn_diffkv as uneven
            import vllm.v1.core.kv_cache_manager as manager
            import vllm.v1.core.kv_cache_utils as utils
            import vllm.v1.worker.gpu.attn_utils as runner
            import vllm.v1.worker.kv_connector_model_runner_mixin as mixin
            import vllm.v1.worker.utils as worker_utils

        # Metadata travels as it is, without an encoding.
        worker.NixlAgentMetadata = worker.NixlHandshakePayload = SimpleNamespace
        worker.msgspec = SimpleNamespace(
            msgpack=SimpleNamespace(Encoder=lambda: SimpleNamespace(encode=lambda data: data))
        )
        self.nixl = worker
        self.scheduler = scheduler.NixlBaseConnectorScheduler
        self.worker_class = _make_worker_class(puller.NixlPullConnectorWorker)
        self.offloading = offloading.OffloadingConnectorWorker
        self.manager, self.utils, self.runner, self.mixin = manager, utils, runner, mixin
        self._kernel_blocks = [backend.MultipleOf(1)]
        self._backends: dict[Any, Any] = {}
        self._backend_bases = {
            "states": backend.AttentionBackend,
            "mla": mla.MLACommonBackend,
            "even": flash.FlashAttentionBackend,
            "uneven": uneven.FlashAttentionDiffKVBackend,
        }
        group_class = worker_utils.AttentionGroup
        builder = SimpleNamespace(
            get_cudagraph_support=lambda *_: backend.AttentionCGSupport.ALWAYS
        )
        group_class.create_metadata_builders = lambda *_, **__: None
        group_class.get_metadata_builder = lambda *_: builder
        runner.torch = worker_utils.torch = mixin.torch = _LazyTorch()
        for name in ("bind_kv_cache", "bind_kv_cache_to_layers"):
            setattr(runner, name, lambda *_, **__: None)

        with self.modules.importable():
            import vllm.model_executor.layers.mamba.mamba_utils as states

        states.is_conv_state_dim_first = lambda: True

    def make_layer(self, spec: Any) -> SimpleNamespace:
        """Return a layer that says which attention backend it has."""
        size_v = getattr(spec, "head_size_v", None)
        if hasattr(spec, "shapes"):
            key: tuple[Any, ...] = ("states",)
        elif "MLA" in type(spec).__name__:
            key = ("mla",)
        elif size_v is None or size_v == spec.head_size:
            key = ("even",)
        else:
            key = ("uneven", size_v)
        if key not in self._backends:
            self._backends[key] = self._make_backend(*key)
        backend = self._backends[key]
        return SimpleNamespace(
            get_attn_backend=lambda: backend, kv_sharing_target_layer_name=None, num_heads=0
        )

    def _make_backend(self, kind: str, size_v: int = 0) -> Any:
        def shape_uneven(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, **_: str
        ) -> tuple[int, ...]:
            return (num_blocks, block_size, num_kv_heads, head_size + size_v)

        base, name = self._backend_bases[kind], f"{kind}{size_v}"
        members = {
            "full_cls_name": classmethod(lambda cls: ("witness", name)),
            "get_name": staticmethod(lambda: name),
            "get_supported_kernel_block_sizes": staticmethod(lambda *_: self._kernel_blocks),
        }
        if kind == "uneven":
            # vLLM keeps the size of values in one attribute for all layers.
            members["get_kv_cache_shape"] = staticmethod(shape_uneven)
        return type(name, (base,), members)

    def allocate(self, plan: Any, config: Any) -> dict[str, Any]:
        """Return the tensors of all layers, from vLLM's runner."""
        cpu = torch.device("cpu")
        with self.modules.importable():
            groups, _, sizes = self.runner.init_attn_backend(plan, config, cpu)
            return self.runner.init_kv_cache([], {}, plan, groups, cpu, "auto", sizes, config)

    def allocate_cross_layers(self, plan: Any, config: Any) -> Any:
        """Return the one tensor of all layers that vLLM makes for cross-layer blocks."""
        cpu = torch.device("cpu")
        with self.modules.importable():
            groups, _, sizes = self.runner.init_attn_backend(plan, config, cpu)
            make = self.mixin.KVConnectorModelRunnerMixin.allocate_uniform_kv_caches
            return make(plan, groups, "auto", cpu, sizes)[1]

    def list_blocks(
        self, plan: Any, config: Any, prompt_length: int
    ) -> tuple[tuple[list[int], ...], tuple[list[int], ...]]:
        """Return the blocks of a prompt, as vLLM's schedulers allocate and clip them."""
        with self.modules.importable():
            cache_config = self.utils.generate_scheduler_kv_cache_config([plan])
            scheduler = self.scheduler(config, "engine", cache_config)
            clip = scheduler.get_sw_clipped_blocks
            request = _make_request(prompt_length)
            if scheduler._has_mamba:
                scheduler._truncate_mamba_request_for_prefill(request)
            loaded = scheduler._mamba_prefill_token_count(prompt_length)
            offered = self._allocate_blocks(cache_config, request.num_prompt_tokens, 0)
            read = self._allocate_blocks(cache_config, 0, loaded)
            return (
                clip(tuple(offered.get_block_ids())),
                clip(tuple(read.get_unhashed_block_ids_all_groups())),
            )

    def _allocate_blocks(self, cache_config: Any, computed: int, loaded: int) -> Any:
        """Return the blocks of a request that computes some tokens, or loads them."""
        length = computed + loaded
        block_sizes = [group.kv_cache_spec.block_size for group in cache_config.kv_cache_groups]
        manager = self.manager.KVCacheManager(
            cache_config, 1 << 20, math.lcm(*block_sizes), 1, enable_caching=False
        )
        request = SimpleNamespace(
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            num_prompt_tokens=length,
            num_tokens=length,
            request_id="request",
            status=None,
        )
        blocks = manager.allocate_slots(
            request, computed, num_external_computed_tokens=loaded, delay_cache_blocks=bool(loaded)
        )
        assert blocks is not None, "too few blocks"
        return manager.get_blocks("request")


def _make_request(prompt_length: int) -> SimpleNamespace:
    """Return a request of prefill, as far as vLLM truncates it."""
    return SimpleNamespace(
        _all_token_ids=[0] * prompt_length,
        get_skip_reading_prefix_cache=lambda: False,
        kv_transfer_params={"do_remote_decode": True},
        max_tokens=1,
        num_prompt_tokens=prompt_length,
        prompt_token_ids=[0] * prompt_length,
    )


class _LazyTorch:
    """torch, but zeros take no memory before they are written, and none when they are released.

    Each has a mapping of its own: in the C library's heap, what is released of a few megabytes
    stays in the process, which then grows by gigabytes in a thousand pairs.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(size: int, dtype: Any, device: Any) -> Any:
        return torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.int8)[:size]


class _Agent:
    """An agent of NIXL that takes everything."""

    def __init__(self, *_: object) -> None:
        pass

    def get_reg_descs(self, ranges: Any, memory_type: str) -> Any:
        return ranges

    def get_xfer_descs(self, blocks: Any, memory_type: str) -> Any:
        return blocks

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: b""


class _OnDevice:
    """A storage that is on device 0, as a CPU has no number."""

    device = SimpleNamespace(index=0)

    def __init__(self, storage: Any) -> None:
        self.nbytes, self.data_ptr = storage.nbytes, storage.data_ptr


def _make_worker_class(base: Any) -> Any:
    class Worker(base):  # type: ignore[misc]
        def _register_packed_kv_cache(self, storage: Any) -> None:
            super()._register_packed_kv_cache(_OnDevice(storage))

        def shutdown(self) -> None:
            """Release nothing: the agent holds nothing."""

    return Worker


def _list_layers(config: Any, _: object, names: Any = None) -> dict[str, Any]:
    return {name: config.layers[name] for name in (config.layers if names is None else names)}


def _list_layer_specs(plan: Any) -> dict[str, Any]:
    return {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in plan.kv_cache_groups
        for name in group.layer_names
    }


def _list_tensors(cache: Any) -> list[Any]:
    return cache if isinstance(cache, list) else [cache]


def _expand_descriptors(blocks: Any) -> tuple[Any, Any]:
    """Return where each descriptor starts and its bytes, of a list of (address, size, device)."""
    rows = np.array(blocks, dtype=np.int64)
    return rows[:, 0], rows[:, 1]
