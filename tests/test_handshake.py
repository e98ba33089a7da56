"""What NIXL's handshake takes of two workers is what vLLM's own code takes."""

from __future__ import annotations

import ast
import math
import random
import zipfile
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from architectures import Architecture, LayerShape, build_layout, draw_architecture
from vllmwheel import find_wheel
from witness import Witness

from onnxkvrename.vllm.handshake import check_handshake
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

SEEDS = range(1000)
LAYOUTS = {"0.24": "HND", "0.33": "LBHNC"}
REFUSALS = (AssertionError, NotImplementedError, RuntimeError)


def load_topology_rules(version: str) -> dict[str, Any]:
    """The arithmetic of vLLM's ``TransferTopology``, without the module around it."""
    wheel = find_wheel(f"{version}.0")
    assert not isinstance(wheel, str)
    with zipfile.ZipFile(wheel) as archive:
        module = ast.parse(archive.read("vllm/distributed/kv_transfer/kv_connector/utils.py"))
    (topology,) = [n for n in module.body if getattr(n, "name", "") == "TransferTopology"]
    assert isinstance(topology, ast.ClassDef)
    names = ("tp_ratio", "block_size_ratio")
    module.body = [n for n in topology.body if getattr(n, "name", "") in names]
    rules: dict[str, Any] = {}
    exec(compile(module, "<wheel>/kv_connector/utils.py", "exec"), rules)
    return {name: rules[name] for name in names}


class Worker:
    """vLLM's decode worker, which meets prefill."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.witness = Witness(f"{version}.0")
        self.rules = load_topology_rules(version)
        with self.witness.modules.importable():
            import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker as nixl

            self.worker, self.compute_tp_mapping = (
                nixl.NixlBaseConnectorWorker,
                nixl.compute_tp_mapping,
            )

    def accepts(
        self, prefill: Architecture, decode: Architecture, kernel_block: int | None
    ) -> bool | None:
        """Whether vLLM takes the two; ``None`` where one side has no plan."""
        sides = [self._describe(architecture, kernel_block) for architecture in (prefill, decode)]
        if None in sides:
            return None
        remote, local = (side for side in sides if side is not None)
        self.remote_block_size = remote.block_size
        heads = next(layer.heads for layer in decode.layers if layer.kind != "mamba")
        uses_mla = "mla" in next(layer.kind for layer in decode.layers if layer.kind != "mamba")
        topology = SimpleNamespace(
            tp_size=decode.tp,
            block_size=local.block_size,
            total_num_kv_heads=heads,
            local_physical_heads=max(1, heads // decode.tp),
            is_kv_replicated=lambda _: prefill.tp > heads,
            get_engine_info=lambda _: SimpleNamespace(remote_tp_size=prefill.tp, remote_dcp_size=1),
        )
        topology.tp_ratio = lambda size: self.rules["tp_ratio"](topology, size)
        topology.block_size_ratio = lambda size: self.rules["block_size_ratio"](topology, size)
        layout = LAYOUTS[self.version]
        meta = SimpleNamespace(
            engine_id="prefill",
            block_size=remote.block_size,
            physical_blocks_per_logical_kv_block=remote.kernel_blocks,
            kv_cache_layout=layout,
            attn_backend_name="FLASH_ATTN",
            block_lens=remote.block_lens,
            block_strides=remote.block_lens,
            num_blocks=7,
            kv_caches_base_addr=[0] * len(remote.block_lens),
            region_num_blocks=None,
            ple_block_len=None,
            region_group_ids=None,
            region_names=None,
            region_mem_types=None,
        )
        worker = SimpleNamespace(
            transfer_topo=topology,
            use_mla=uses_mla,
            use_host_buffer=False,
            kv_cache_layout=layout,
            backend_name="FLASH_ATTN",
            enable_permute_local_kv=False,
            kv_transfer_config=SimpleNamespace(enable_permute_local_kv=False),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)),
            block_size=local.block_size,
            block_len_per_layer=local.block_lens,
            dst_num_blocks={"prefill": 7},
            dcp_size=1,
            region_group_ids=None,
            _has_mamba=local.has_states,
            _is_hma_required=local.is_hybrid,
            _physical_blocks_per_logical_kv_block=local.kernel_blocks,
            _is_region_replicated=lambda _: False,
            _head_sharded_draft_regions={},
            _head_sharded_draft_kv_heads=None,
            _transfer_layer_region_indices=None,
            _layer_specs={},
        )
        with self.witness.modules.importable():
            try:
                if self.version == "0.33" and local.has_states and uses_mla:
                    self.worker._split_remote_blocks(worker, meta)
                    if meta.block_lens != remote.block_lens:
                        return None  # lengths of kernel blocks are another matter
                self.worker._validate_remote_agent_handshake(worker, meta, prefill.tp)
                if self.version == "0.33" and prefill.tp > decode.tp and not uses_mla:
                    self._split_regions(worker, topology, prefill.tp, local.spec_types)
            except REFUSALS:
                return False
        return True

    def _split_regions(
        self, worker: SimpleNamespace, topology: Any, ranks: int, spec_types: tuple[type, ...]
    ) -> None:
        """Split one region of attention among the ranks of prefill, as vLLM 0.33 does."""
        topology.is_mla, topology.tp_rank = False, 0
        topology.dcp_consumer_count = lambda *_: 1
        plan = self.compute_tp_mapping(topology, ranks, spec_types)
        ratio = worker.transfer_topo.block_size_ratio(self.remote_block_size)
        worker._group_spec_types, worker._ple_region_index = spec_types, None
        worker._strided_desc_starts = lambda descriptors: descriptors[:, 0]
        worker._fa_desc_replicated = lambda starts, *_: starts != 0
        region = numpy.array([[0, 64, 0, 0, 1]])
        next(self.worker._build_local_splits_from_plan(worker, plan, region, 1, ratio))

    def _describe(
        self, architecture: Architecture, kernel_block: int | None
    ) -> SimpleNamespace | None:
        interface = self.witness.interface
        settings = {}
        if self.version == "0.33":
            settings["layout"] = interface.KVCacheLayout[LAYOUTS["0.33"]]
        groups = self.witness.make_groups(architecture, **settings)
        if groups is None:
            return None
        specs = [
            spec
            for group in groups
            for spec in getattr(
                group.kv_cache_spec, "kv_cache_specs", dict.fromkeys(group.layer_names)
            ).values()
            for spec in [group.kv_cache_spec if spec is None else spec]
        ]
        group_specs = [group.kv_cache_spec for group in groups]
        judged = group_specs if self.version == "0.24" else specs
        first_specs = [
            next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values())) for spec in group_specs
        ]
        block_sizes = [
            spec.block_size for spec in first_specs if not isinstance(spec, interface.MambaSpec)
        ]
        aligned, _ = self.witness._align_blocks(architecture)
        block_size = math.lcm(*block_sizes) if self.version == "0.33" else aligned
        if kernel_block and (set(block_sizes) != {block_size} or block_size % kernel_block):
            return None
        kernel_blocks = block_size // (kernel_block or block_size)
        return SimpleNamespace(
            block_size=block_size // kernel_blocks,
            kernel_blocks=kernel_blocks,
            block_lens=[spec.page_size_bytes // kernel_blocks for spec in specs],
            has_states=any(isinstance(spec, interface.MambaSpec) for spec in specs),
            spec_types=tuple(map(type, first_specs)),
            is_hybrid=any(not isinstance(spec, interface.FullAttentionSpec) for spec in judged),
        )


@pytest.mark.parametrize("version", ["0.24", "0.33"])
def test_vllm_refuses_the_same_pairs(version: str) -> None:
    worker, seen = Worker(version), Counter[str]()
    for seed in SEEDS:
        rng, drawn = random.Random(seed), draw_architecture(seed)
        attention = [layer for layer in drawn.layers if layer.kind != "mamba"]
        kinds = {"mla" in layer.kind for layer in attention}
        if len(kinds) != 1 or len({layer.heads for layer in attention}) != 1:
            continue
        prefill = drawn._replace(tp=rng.choice([1, 2, 4, 8]), block_size=rng.choice([16, 32, 48]))
        decode = drawn._replace(tp=rng.choice([1, 2, 4, 8]), block_size=rng.choice([16, 32, 96]))
        requests = tuple(
            ProjectionRequest(side.block_size, side.tp, version) for side in (prefill, decode)
        )
        layout = build_layout(drawn)
        if any(project_layout(layout, request).refusals for request in requests):
            continue
        kernel_block = rng.choice([None, None, 8, 16])
        accepted = worker.accepts(prefill, decode, kernel_block)
        if accepted is None:
            continue
        findings = check_handshake(
            (layout, layout), (requests[0], requests[1]), kernel_block
        ).findings
        assert accepted == (not findings), (prefill, decode, findings)
        seen[findings[0].code if findings else "accepted"] += 1
    assert min(seen[key] for key in ("accepted", "KV619", "KV622")) > 3, seen


@pytest.mark.parametrize("version", ["0.24", "0.33"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (4, 2), (1, 2)])
def test_vllm_refuses_the_same_blocks_beside_states(version: str, ranks: tuple[int, int]) -> None:
    layers = (
        LayerShape("full_attention", 2, 256, 256, None, (), "FLOAT16"),
        LayerShape("mamba", 0, 0, 0, None, ((512, 3), (8, 64, 64)), "FLOAT16"),
    )
    prefill, decode = (
        Architecture(layers, size, count) for size, count in zip((48, 96), ranks, strict=True)
    )
    requests = (
        ProjectionRequest(48, ranks[0], version),
        ProjectionRequest(96, ranks[1], version),
    )
    layout = build_layout(decode)
    findings = check_handshake((layout, layout), requests).findings
    assert Worker(version).accepts(prefill, decode, None) == (not findings)
    assert bool(findings) == (version == "0.24" or ranks == (2, 1))
