"""vLLM's own memory for an architecture: allocated, registered with NIXL and for offloading.

vLLM's runner allocates the tensors, on a CPU, and its connectors' workers register them with an
agent that only takes notes. What they register, which descriptors a prompt posts and which bytes
those cover is read off these notes. Attention backends take blocks undivided.
"""

from __future__ import annotations

import copy
import inspect
import math
import mmap
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from architectures import Architecture, Deployment
from vllmwheel import make_config
from witness import REFUSALS, Witness

PAIR_BLOCK_COUNT = 101
"""The number of blocks of each side of a pair: with few, vLLM may take regions for one another."""
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


class PromptBlocks(NamedTuple):
    """Blocks of a prompt.

    Attributes:
        tokens: How many tokens prefill computes for decode.
        offered: The blocks that prefill offers, of each group.
        allocated: The blocks that decode allocates, of each group.
    """

    tokens: int
    offered: tuple[list[int], ...]
    allocated: tuple[list[int], ...]


class Memory:
    """The tensors that vLLM allocates for a plan of one architecture."""

    def __init__(
        self,
        witness: MemoryWitness,
        architecture: Architecture,
        plan: Any,
        *,
        is_cross_layers: bool = False,
        memory_layout: str = "HND",
        **settings: Any,
    ) -> None:
        self.witness, self.architecture, self.plan = witness, architecture, plan
        self.memory_layout = memory_layout
        self.deployment: Deployment | None = None
        self.config = make_config(**settings)
        witness.memory_layout = memory_layout
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
        self.witness.memory_layout = self.memory_layout
        self.witness.enter_world(self.deployment)
        with self.witness.modules.importable():
            worker = self.witness.worker_class(self.config, engine, self.plan)
            if self.deployment is not None:
                self._name_connector(worker, self.deployment)
            if self.is_cross_layers:
                worker.register_cross_layers_kv_caches(self.caches["0"])
            else:
                worker.register_kv_caches(self.caches)
        return worker

    def _name_connector(self, worker: Any, deployment: Deployment) -> None:
        """Give a worker the names that its attention backend and its connector have."""
        first = self.architecture.layers[0]
        if first.kind != "mamba":
            worker.backend_name = deployment.settings.attention_backend or deployment.world.backend
        if deployment.settings.connector == "NixlPushConnector":
            worker._TRANSFER_MODE = "push"

    def deploy(self, deployment: Deployment) -> None:
        """Make the configuration what vLLM makes of a line, as far as NIXL's connector reads it."""
        config, settings, world = self.config, deployment.settings, deployment.world
        self.deployment = deployment
        attention = [layer for layer in self.architecture.layers if layer.kind != "mamba"]
        first = attention[0] if attention else self.architecture.layers[0]
        size = first.head_size + (first.head_size_v if "mla" in first.kind else 0)
        dtype = {"half": "float16"}.get(settings.dtype or "", settings.dtype or world.dtype)
        config.model_config.model = settings.model or world.model
        config.model_config.dtype = f"torch.{dtype}"
        config.model_config.get_head_size = lambda: size
        config.model_config.get_total_num_hidden_layers = lambda: len(self.architecture.layers)
        config.cache_config.cache_dtype = settings.kv_cache_dtype or world.cache_dtype
        config.cache_config.enable_prefix_caching = bool(settings.has_prefix_caching)
        config.speculative_config = _make_speculative_config(deployment, self.config.model_config)
        config.kv_transfer_config.get_from_extra_config = settings.extra_config.get

    def meet(self, prefill: Memory) -> None:
        """Compare the hashes as a handshake does, and connect; raise what vLLM raises."""
        remote = prefill.register(engine="prefill").xfer_handshake_metadata
        self.witness.hashed.append(self.witness.last_hashed)
        worker = self.register(engine="decode")
        self.witness.hashed.append(self.witness.last_hashed)
        if worker.enforce_compat_hash and remote.compatibility_hash != worker.compat_hash:
            raise RuntimeError("NIXL compatibility hash mismatch")
        self.connect(prefill)

    def connect(self, prefill: Memory) -> list[Any]:
        """Let the ranks of this side, decode, meet those of `prefill`; raise what vLLM raises.

        Returns:
            NIXL's worker of each rank of decode.
        """
        remote = prefill.register(engine="prefill").xfer_handshake_metadata.agent_metadata_bytes
        ranks = prefill.architecture.tp
        workers = []
        for rank in range(self.architecture.tp):
            worker = self.register(rank, "decode")
            with self.witness.modules.importable():
                for remote_rank in worker.transfer_topo.handshake_target_ranks(ranks):
                    # vLLM decodes metadata of its own from each rank, and changes it.
                    meta = SimpleNamespace(**copy.deepcopy(vars(remote)))
                    name = worker.add_remote_agent(meta, remote_rank, ranks)
                    # vLLM's thread of handshakes keeps these names.
                    key = remote_rank if self.witness.is_v024 else (0, remote_rank)
                    worker._remote_agents[meta.engine_id][key] = name
            workers.append(worker)
        return workers

    def post(self, worker: Any, block_ids: tuple[list[int], ...], kernel_blocks: int = 1) -> Posted:
        """Return what `worker` posts for blocks of each group.

        `kernel_blocks` says into how many vLLM divides a block of attention.
        """
        settings: dict[str, Any] = {}
        if hasattr(worker, "dst_region_num_blocks"):
            settings = {
                "region_num_blocks": worker.dst_region_num_blocks["engine"],
                "region_group_ids": worker.region_group_ids,
                "uses_region_group_mapping": worker._uses_region_group_mapping,
            }
        ids = worker._compute_desc_ids(
            block_ids, worker.num_blocks, None, kernel_blocks, **settings
        )
        ids = np.asarray(ids, np.int64)
        starts, sizes = _expand_descriptors(worker.src_blocks_data)
        return Posted(
            worker.num_regions,
            len(ids),
            int(sizes[ids].sum()),
            self._covers_pages(starts[ids], sizes[ids], block_ids),
        )

    def covers_blocks(self) -> bool | None:
        """Return whether the descriptors of one block of each group cover its pages."""
        worker = self.register()
        count = worker._physical_blocks_per_logical_kv_block
        specs = _list_layer_specs(self.plan)
        blocks = list[list[int]]()
        for index, group in enumerate(self.plan.kv_cache_groups, start=1):
            # A block of states is not divided.
            is_whole = hasattr(specs[group.layer_names[0]], "shapes")
            blocks.append([index] if is_whole else [index * count + i for i in range(count)])
        return self.post(worker, tuple(blocks), count).covers_pages

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

    def list_blocks(self, prompt_length: int) -> PromptBlocks:
        """Return the blocks of a prompt."""
        return self.witness.list_blocks(self.plan, self.config, prompt_length)

    def build_canonical_view(self) -> tuple[list[int], list[list[tuple[int, int]]]] | str:
        """Return the offloading connector's tensors and references, or why it refuses."""
        views: list[Any] = []
        spec = SimpleNamespace(
            config=SimpleNamespace(canonical_layout=False),
            get_worker=views.append,
            kv_cache_config=self.plan,
            replicated_layout=False,
        )
        with self.witness.modules.importable():
            try:
                settings = {"vllm_config": self.config, "kv_cache_config": self.plan}
                parameters = inspect.signature(self.witness.offloading).parameters
                worker = self.witness.offloading(
                    spec, **{name: settings[name] for name in parameters if name in settings}
                )
                if hasattr(worker, "_register_handlers"):
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


class PairRefusal(NamedTuple):
    """Why vLLM does not hand over: the step that fails, and what it says."""

    step: str
    reason: str


class _PairedBlocks(NamedTuple):
    """Kernel blocks of each group whose descriptors vLLM looks up, and how many make a block."""

    ids: Any
    pieces: int


class Read(NamedTuple):
    """What a rank of decode asks NIXL for, for one prompt.

    Attributes:
        transfers: The number of transfers, one for each rank of prefill that it reads from.
        descriptors: The number of descriptors of all of them.
        size: Bytes of these descriptors.
        is_in_place: Whether the blocks of attention that are read begin at the same tokens as those
            that they are written to.
    """

    transfers: int
    descriptors: int
    size: int
    is_in_place: bool


class Pair(NamedTuple):
    """Workers that met: decode's have added prefill's as their remote agents."""

    witness: MemoryWitness
    prefill: Memory
    decode: Memory
    workers: list[Any]

    def read(self, prompt_length: int) -> list[Read] | PairRefusal:
        """Return what each rank of decode posts for a prompt, or the assertion that fails."""
        tokens, offered, _ = self.prefill.list_blocks(prompt_length)
        _, _, allocated = self.decode.list_blocks(prompt_length)
        posted = []
        for worker in self.workers:
            agent = worker.nixl_wrapper
            agent.reads.clear()
            worker.paired_blocks.clear()
            try:
                with self.witness.modules.importable():
                    worker.start_load_kv(_make_load(offered, allocated))
            except (*REFUSALS, RuntimeError) as error:
                return PairRefusal("read", f"{type(error).__name__}: {error}")
            for local, remote in agent.reads:
                if not np.array_equal(local[:, 1], remote[:, 1]):
                    return PairRefusal("read", "NIXL refuses lengths that differ")
            local_parts = [local for local, _ in agent.reads]
            # vLLM looks up the descriptors of prefill's blocks, then those of decode's.
            paired = worker.paired_blocks
            places = (
                [self._find_tokens(self.prefill, each, offered, tokens) for each in paired[::2]],
                [self._find_tokens(self.decode, each, allocated, tokens) for each in paired[1::2]],
            )
            posted.append(
                Read(
                    len(local_parts),
                    sum(map(len, local_parts)),
                    sum(int(part[:, 1].sum()) for part in local_parts),
                    places[0] == places[1],
                )
            )
        return posted

    def _find_tokens(self, side: Memory, blocks: _PairedBlocks, ids: Any, tokens: int) -> list[int]:
        """Return the first token of each kernel block of attention that `side` has paired."""
        found = []
        for group, kernel_ids, logical_ids in zip(
            side.plan.kv_cache_groups, blocks.ids, ids, strict=True
        ):
            size = group.kv_cache_spec.block_size
            if hasattr(group.kv_cache_spec, "shapes"):
                continue
            first = -(-tokens // size) - len(logical_ids)
            for kernel_id in kernel_ids:
                logical, piece = divmod(kernel_id, blocks.pieces)
                block = first + list(logical_ids).index(logical)
                found.append(block * size + piece * size // blocks.pieces)
        return found


def _make_load(offered: Any, allocated: Any) -> SimpleNamespace:
    """Return what decode's scheduler tells its workers about one request."""
    request = SimpleNamespace(
        awaiting_kvs=True,
        local_block_ids=allocated,
        local_num_computed_blocks=(),
        local_physical_block_ids=(),
        remote=SimpleNamespace(
            block_ids=offered,
            blocks_expiry_time=None,
            engine_id="prefill",
            num_tokens=None,
            registration_generation=0,
            request_id="request",
        ),
    )
    return SimpleNamespace(
        heartbeat_by_engine={},
        reqs_in_batch=(),
        reqs_not_processed=(),
        reqs_to_recv={"request": request},
        reqs_to_send={},
        scheduler_clock=0,
    )


class MemoryWitness(Witness):
    """vLLM of one version, with its runner's allocation and its connectors."""

    can_allocate = True
    memory_layout = "HND"
    """The layout of the worker that is built or registered, in 0.24."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.last_hashed: dict[str, Any] = {}
        self.hashed: list[dict[str, Any]] = []
        with self.modules.importable():
            import vllm.config as config
            import vllm.distributed.nixl_utils as nixl
            import vllm.envs as envs
            import vllm.v1.attention.backends.utils as backend_utils

            envs.VLLM_BATCH_INVARIANT = False
            envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL = None
            config.get_layers_from_vllm_config = _list_layers
            nixl.NixlWrapper, nixl.nixl_agent_config = _Agent, None
            backend_utils.get_kv_cache_layout = lambda: self.memory_layout

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
        self._multiple_of = backend.MultipleOf
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
            import vllm.config.utils as config_utils
            import vllm.model_executor.layers.mamba.mamba_utils as states

        self._states = states
        hash_factors = config_utils.hash_factors

        def record(factors: dict[str, Any]) -> str:
            self.last_hashed = factors
            return str(hash_factors(factors))

        config_utils.hash_factors = record

    def enter_world(self, deployment: Deployment | None) -> None:
        """Let vLLM's modules see the release and the variables of one worker."""
        is_first = deployment is None or deployment.settings.ssm_conv_state_layout == "DS"
        self._states.is_conv_state_dim_first = lambda: is_first
        with self.modules.importable():
            import vllm

            vllm.__version__ = self.version if deployment is None else deployment.world.release

    def refuse_deployments(
        self, prefill: Deployment, decode: Deployment, kernel_block_size: int | None = None
    ) -> PairRefusal | None:
        """Return why vLLM does not hand over from prefill to decode, with their lines.

        What their hashes are made of is then in `hashed`, if both registered.

        Args:
            prefill: The worker that is read.
            decode: The worker that reads.
            kernel_block_size: As for `refuse_pair`.
        """
        self._kernel_blocks = [kernel_block_size or self._multiple_of(1)]
        self.hashed = []
        try:
            return self._refuse_deployments(prefill, decode)
        finally:
            self._kernel_blocks = [self._multiple_of(1)]
            self.memory_layout = "HND"
            self.enter_world(None)

    def _refuse_deployments(self, prefill: Deployment, decode: Deployment) -> PairRefusal | None:
        sides = []
        for name, deployment in (("prefill", prefill), ("decode", decode)):
            try:
                sides.append(self._deploy(deployment))
                sides[-1].register()
            except (*REFUSALS, AttributeError, RuntimeError, TypeError) as error:
                return PairRefusal(name, f"{type(error).__name__}: {error}")
        try:
            sides[1].meet(sides[0])
        except (*REFUSALS, RuntimeError) as error:
            return PairRefusal("handshake", f"{type(error).__name__}: {error}")
        for name, side in zip(("prefill", "decode"), sides, strict=True):
            if side.covers_blocks() is False:
                return PairRefusal(name, "the descriptors do not cover the blocks")
        return None

    def _deploy(self, deployment: Deployment) -> Memory:
        """Return a worker's memory, and let its line decide what its configuration says."""
        architecture, settings = deployment.architecture, deployment.settings
        kinds = {layer.kind for layer in architecture.layers}
        has_mla = any("mla" in kind for kind in kinds)
        is_on = settings.has_hybrid_manager
        if is_on is None:  # VllmConfig turns it off for attention_chunk_size
            is_on = "chunked_local_attention" not in kinds
        layout = settings.kv_cache_layout
        plan_settings: dict[str, Any] = {"has_hybrid_manager": is_on}
        flag = str(settings.extra_config.get("enable_cross_layers_blocks")).lower() == "true"
        if self.is_v024:
            plan_settings["cross_layers"] = flag
        else:
            name = {"NHD": "LBNHC", "HND": "LBHNC"}.get(layout or "", layout)
            name = name or ("LBNHC" if has_mla else "LBHNC")
            plan_settings["layout"] = self.interface.KVCacheLayout[name]
        if "mamba" in kinds and not is_on:
            raise ValueError("hybrid models of states need the hybrid manager")
        plan = self.make_plan(architecture, PAIR_BLOCK_COUNT, **plan_settings)
        if plan is None:
            raise ValueError("vLLM has no plan for the layers")
        memory = Memory(self, architecture, plan, memory_layout=layout or "HND", **plan_settings)
        memory.deploy(deployment)
        return memory

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
            if "runner_kv_caches" not in inspect.signature(self.runner.init_kv_cache).parameters:
                return self.runner.init_kv_cache({}, plan, cpu, sizes, config)
            if not self.is_v024:
                return self.runner.init_kv_cache([], {}, plan, cpu, sizes, config)
            return self.runner.init_kv_cache([], {}, plan, groups, cpu, "auto", sizes, config)

    def allocate_cross_layers(self, plan: Any, config: Any) -> Any:
        """Return the one tensor of all layers that 0.24 makes for cross-layer blocks."""
        cpu = torch.device("cpu")
        with self.modules.importable():
            groups, _, sizes = self.runner.init_attn_backend(plan, config, cpu)
            make = self.mixin.KVConnectorModelRunnerMixin.allocate_uniform_kv_caches
            return make(plan, groups, "auto", cpu, sizes)[1]

    def meet(
        self, prefill: Architecture, decode: Architecture, kernel_block_size: int | None = None
    ) -> Pair | PairRefusal:
        """Let decode's workers meet prefill's as NIXL has them by default.

        vLLM plans, allocates and registers each side in the layout that NIXL's connector selects,
        and decode's workers add prefill's as their remote agents.

        Args:
            prefill: The model of the worker that is read.
            decode: The model of the worker that reads.
            kernel_block_size: The only block that attention backends take; ``None`` where they
                take any undivided.

        Returns:
            The pair, or why not: vLLM refuses, or the descriptors of a side do not cover its
            blocks.
        """
        self._kernel_blocks = [kernel_block_size or self._multiple_of(1)]
        try:
            return self._meet(prefill, decode)
        finally:
            self._kernel_blocks = [self._multiple_of(1)]

    def _meet(self, prefill: Architecture, decode: Architecture) -> Pair | PairRefusal:
        sides = []
        for name, architecture in (("prefill", prefill), ("decode", decode)):
            try:
                sides.append(self._build_side(architecture))
                sides[-1].register()
            except (*REFUSALS, AttributeError, RuntimeError) as error:
                return PairRefusal(name, f"{type(error).__name__}: {error}")
        try:
            workers = sides[1].connect(sides[0])
        except (*REFUSALS, RuntimeError) as error:
            return PairRefusal("handshake", f"{type(error).__name__}: {error}")
        for name, side in zip(("prefill", "decode"), sides, strict=True):
            if side.covers_blocks() is False:
                return PairRefusal(name, "the descriptors do not cover the blocks")
        try:
            self._receive(workers[0])
        except NotImplementedError:
            pass  # a CPU does not copy every dtype
        except RuntimeError as error:
            return PairRefusal("receive", str(error))
        return Pair(self, sides[0], sides[1], workers)

    def _receive(self, worker: Any) -> None:
        """Let a worker of decode rearrange a block that it has read, as it does when one is done.

        Blocks of one size need none of that, and only the versions that are projected are asked.
        """
        if not self.is_v024 and self.version != "0.33.0":
            return
        info = worker.transfer_topo.get_engine_info("prefill")
        ratio = worker.transfer_topo.block_size_ratio(info.remote_block_size)
        if ratio == 1 or (self.is_v024 and worker.use_mla):
            return
        worker.device_type = "cpu"
        with self.modules.importable():
            if self.is_v024:
                worker.post_process_device_kv_on_receive(ratio, [[1]])
                return
            self.nixl.async_tensor_h2d = lambda ids, _, dtype: torch.tensor(ids, dtype=dtype)
            for index, group in enumerate(worker.kv_cache_config.kv_cache_groups):
                if not hasattr(group.kv_cache_spec, "shapes"):
                    worker.post_process_device_kv_on_receive(
                        ratio, [(index, [1], 1)], not worker.use_mla
                    )

    def _build_side(self, architecture: Architecture) -> Memory:
        """Return a side's memory in the layout that NIXL's connector selects."""
        settings: dict[str, Any] = {}
        if not self.is_v024:
            has_mla = any("mla" in layer.kind for layer in architecture.layers)
            settings["layout"] = self.interface.KVCacheLayout["LBNHC" if has_mla else "LBHNC"]
        plan = self.make_plan(architecture, PAIR_BLOCK_COUNT, **settings)
        if plan is None:
            raise ValueError("vLLM has no plan for the layers")
        return Memory(self, architecture, plan, **settings)

    def list_blocks(self, plan: Any, config: Any, prompt_length: int) -> PromptBlocks:
        """Return the blocks of a prompt, as vLLM's schedulers allocate and clip them."""
        with self.modules.importable():
            cache_config = self.utils.generate_scheduler_kv_cache_config([plan])
            scheduler = self.scheduler(config, "engine", cache_config)
            clip = (
                scheduler.get_sw_clipped_blocks
                if hasattr(scheduler, "get_sw_clipped_blocks")
                else scheduler.get_exchange_clipped_blocks
            )
            request = _make_request(prompt_length)
            if hasattr(scheduler, "_truncate_request_for_prefill"):
                scheduler._truncate_request_for_prefill(request)
            elif scheduler._has_mamba:
                scheduler._truncate_mamba_request_for_prefill(request)
            count = (
                scheduler._mamba_prefill_token_count
                if hasattr(scheduler, "_mamba_prefill_token_count")
                else scheduler._get_remote_prefill_token_count
            )
            offered = self._allocate_blocks(cache_config, request.num_prompt_tokens, 0)
            read = self._allocate_blocks(cache_config, 0, count(prompt_length))
            return PromptBlocks(
                request.num_prompt_tokens,
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


def _make_speculative_config(deployment: Deployment, target: Any) -> Any:
    """Return what ``SpeculativeConfig`` makes of a line; ``None`` without one."""
    config, model = deployment.settings.speculative_config, target.model
    if config is None:
        return None
    method, draft = config.get("method"), config.get("model")
    if str(method).endswith("mtp"):
        method, draft = "mtp", draft or model
    elif method is None:
        method = "eagle3" if "EAGLE3" in str(draft) else "draft_model"
    return SimpleNamespace(
        draft_model_config=SimpleNamespace(
            code_revision=config.get("code_revision"),
            hf_config=SimpleNamespace(),
            model=draft,
            revision=config.get("revision"),
            use_mla=target.use_mla,
        ),
        kv_cache_dtype=config.get("kv_cache_dtype"),
        method=method,
        parallel_drafting=config.get("parallel_drafting", False),
        use_eagle=lambda: method in ("eagle", "eagle3", "mtp", "dflash", "dspark"),
    )


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
    """An agent of NIXL that takes everything, and keeps what is to be transferred.

    Attributes:
        reads: The descriptors of each transfer that was started: local and remote ones, in pairs.
    """

    def __init__(self, *_: object) -> None:
        self._lists: list[Any] = []
        self.reads: list[tuple[Any, Any]] = []

    def get_reg_descs(self, ranges: Any, memory_type: str) -> Any:
        return ranges

    def register_memory(self, ranges: Any, backends: Any = None) -> None:
        pass

    def get_xfer_descs(self, blocks: Any, memory_type: str) -> Any:
        return blocks

    def prep_xfer_dlist(self, agent: str, blocks: Any, mem_type: str = "") -> int:
        self._lists.append(blocks)
        return len(self._lists) - 1

    def make_prepped_xfer(
        self,
        operation: str,
        local: int,
        local_ids: Any,
        remote: int,
        remote_ids: Any,
        notif_msg: bytes = b"",
    ) -> tuple[Any, Any]:
        """Return pairs of (address, length); a list may be empty."""
        assert operation == "READ"
        pairs = []
        for handle, ids in ((local, local_ids), (remote, remote_ids)):
            starts, sizes = _expand_descriptors(self._lists[handle])
            chosen = np.asarray(ids, np.int64)
            pairs.append(np.stack((starts[chosen], sizes[chosen]), axis=1))
        return pairs[0], pairs[1]

    def transfer(self, handle: tuple[Any, Any]) -> None:
        self.reads.append(handle)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: b""


class _OnDevice:
    """A storage that is on device 0, as a CPU has no number."""

    device = SimpleNamespace(index=0)

    def __init__(self, storage: Any) -> None:
        self.nbytes, self.data_ptr = storage.nbytes, storage.data_ptr


def _make_worker_class(base: Any) -> Any:
    class Worker(base):  # type: ignore[misc]
        def __init__(self, *settings: Any) -> None:
            self.paired_blocks = list[_PairedBlocks]()
            super().__init__(*settings)

        def _compute_desc_ids(
            self,
            block_ids: Any,
            dst_num_blocks: int,
            block_size_ratio: int | None,
            physical_blocks_per_logical: int,
            **settings: Any,
        ) -> Any:
            pieces = physical_blocks_per_logical * (block_size_ratio or 1)
            self.paired_blocks.append(_PairedBlocks(block_ids, pieces))
            return super()._compute_desc_ids(
                block_ids, dst_num_blocks, block_size_ratio, physical_blocks_per_logical, **settings
            )

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
    """Return where each descriptor starts and its bytes.

    0.24 lists (address, size, device), 0.33 (address, size, device, stride, count).
    """
    rows = np.array(blocks, dtype=np.int64)
    if rows.shape[1] == 3:
        return rows[:, 0], rows[:, 1]
    counts = rows[:, 4]
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(rows[:, 0], counts) + index * np.repeat(rows[:, 3], counts), np.repeat(
        rows[:, 1], counts
    )
