"""Blocks that fit into a GPU's memory, stage by stage, are those of vLLM's own code."""

from __future__ import annotations

import ast
import random
import zipfile
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from architectures import Architecture, build_layout, draw_architecture
from build_layouts import build_attention, build_layers, build_mla
from tiers import full
from vllmwheel import DType, find_wheel, make_config
from witness import REFUSALS, Witness

from onnxkvrename.vllm.projection import Projection, project_layout
from onnxkvrename.vllm.specs import ProjectionRequest
from onnxkvrename.vllm.stages import count_gpu_blocks

pytestmark = full
SEEDS = range(300)


class Planner:
    """vLLM's ``get_kv_cache_configs`` for the workers of a pipeline."""

    def __init__(self, version: str) -> None:
        self.witness = Witness(f"{version}.0")
        self.version = version
        self.get_pp_indices = load_pp_indices(f"{version}.0")

    def plan(
        self, architecture: Architecture, stages: int, memory: int, **settings: Any
    ) -> list[Any] | None:
        """vLLM's configuration of each worker; ``None`` where it refuses."""
        config = make_config(**settings)
        config.model_config = SimpleNamespace(
            max_model_len=1, original_max_model_len=1, supports_kv_cache_grouping=False
        )
        config.cache_config.mamba_cache_mode = "none"
        config.scheduler_config.max_num_batched_tokens = 1
        config.scheduler_config.max_num_encoder_input_tokens = 1
        config.max_in_flight_tokens, config.num_prefill_lookahead_tokens = 1, 0
        config.parallel_config.prefill_context_parallel_size = 1
        config.parallel_config.tensor_parallel_size = architecture.tp
        specs = self.witness.make_specs(architecture)
        ranges = [range(*self.get_pp_indices(len(specs), rank, stages)) for rank in range(stages)]
        workers = [
            {name: spec for name, spec in specs.items() if int(name) in layers} for layers in ranges
        ]
        planning = self.witness.planning
        with self.witness.modules.importable():
            try:
                if self.version == "0.24":
                    planning.get_kv_cache_capacity = lambda *_: (0, 0.0)
                    return list(planning.get_kv_cache_configs(config, workers, [memory] * stages))
                import vllm.v1.core.kv_cache_config_builder as builders

                builders.get_kv_cache_config_builder = (  # type: ignore[attr-defined]
                    lambda _: planning.DefaultKVCacheConfigBuilder()
                )
                groups = planning.get_global_kv_cache_groups(config, workers)
                return list(
                    planning.get_kv_cache_configs(config, workers, [memory] * stages, groups)
                )
            except REFUSALS:
                return None


def load_pp_indices(version: str) -> Any:
    """vLLM's own ``get_pp_indices``, without the module around it."""
    wheel = find_wheel(version)
    assert not isinstance(wheel, str)
    with zipfile.ZipFile(wheel) as archive:
        module = ast.parse(archive.read("vllm/distributed/utils.py"))
    module.body = [n for n in module.body if getattr(n, "name", "") == "get_pp_indices"]
    names: dict[str, Any] = {
        "envs": SimpleNamespace(VLLM_PP_LAYER_PARTITION=None),
        "logger": SimpleNamespace(info=lambda *_: None),
    }
    exec(compile(module, "<wheel>/vllm/distributed/utils.py", "exec"), names)
    return names["get_pp_indices"]


def project(
    architecture: Architecture, version: str, stages: int, memory: int | None = None
) -> Projection:
    request = ProjectionRequest(
        architecture.block_size,
        architecture.tp,
        version,
        pipeline_parallel_size=stages,
        gpu_memory=memory,
    )
    return project_layout(build_layout(architecture), request)


def compare_blocks(planner: Planner, name: str, **settings: Any) -> Counter[str]:
    """Compare the blocks and the bytes of each stage for one allocation; count what was seen."""
    seen = Counter[str]()
    for seed in SEEDS:
        rng = random.Random(seed)
        architecture = draw_architecture(seed)
        stages = rng.choice([1, 1, 2, 3, 5])
        found = [
            (index, allocation)
            for index, allocation in enumerate(
                project(architecture, planner.version, stages).allocations
            )
            if allocation.name == name and allocation.is_possible
        ]
        if not found:
            seen["not possible"] += 1
            continue
        ((index, allocation),) = found
        assert allocation.bytes_per_block is not None
        memory = int(allocation.bytes_per_block * rng.uniform(80, 160))
        projection = project(architecture, planner.version, stages, memory)
        configs = planner.plan(architecture, stages, memory, **settings)
        assert configs is not None, architecture
        block_count = count_gpu_blocks(allocation.bytes_per_block, memory)
        assert {config.num_blocks for config in configs} == {block_count}, architecture
        for config, stage in zip(configs, projection.stages, strict=True):
            names = [name for group in config.kv_cache_groups for name in group.layer_names]
            assert sorted({int(name) for name in names}) == list(stage.layers), architecture
            sizes = [tensor.size for tensor in config.kv_cache_tensors]
            # 0.24's tensors add up unless they alias one allocation.
            is_shared = planner.version == "0.33" or any(
                tensor.block_stride for tensor in config.kv_cache_tensors
            )
            size = sizes[0] if is_shared else sum(sizes)
            assert size == stage.bytes_per_block[index] * block_count, architecture
        seen["several stages" if stages > 1 else "one stage"] += 1
    return seen


@pytest.mark.parametrize(("name", "cross_layers"), [("unpacked", False), ("packed", True)])
def test_the_blocks_of_0_24_are_vllms(name: str, cross_layers: bool) -> None:
    seen = compare_blocks(Planner("0.24"), name, cross_layers=cross_layers)
    assert min(seen["one stage"], seen["several stages"]) > 0.05 * len(SEEDS), seen


@pytest.mark.parametrize("name", ["LBNHC", "BLHNC"])
def test_the_blocks_of_0_33_are_vllms(name: str) -> None:
    planner = Planner("0.33")
    with planner.witness.modules.importable():
        layout = planner.witness.interface.KVCacheLayout[name]
    seen = compare_blocks(planner, name, layout=layout)
    assert min(seen["one stage"], seen["several stages"]) > 0.05 * len(SEEDS), seen


def test_the_memory_that_0_33_refuses_is_not_enough() -> None:
    planner, seen = Planner("0.33"), Counter[bool]()
    with planner.witness.modules.importable():
        layout = planner.witness.interface.KVCacheLayout["BLHNC"]
    for seed in SEEDS:
        architecture = draw_architecture(seed)
        if any(layer.kind == "cross_attention" for layer in architecture.layers):
            continue  # takes as many blocks as the encoder has tokens
        for allocation in project(architecture, "0.33", 1).allocations:
            if allocation.name != "BLHNC" or allocation.bytes_per_block is None:
                continue
            memory = allocation.bytes_per_block * random.Random(seed).choice([1, 2, 3, 4, 5, 9])
            found = project(architecture, "0.33", 1, memory).allocations
            (condition,) = [
                c for a in found if a.name == "BLHNC" for c in a.conditions if c.name == "memory"
            ]
            accepted = planner.plan(architecture, 1, memory, layout=layout) is not None
            assert accepted == (condition.state == "met"), architecture
            seen[accepted] += 1
    assert min(seen[True], seen[False]) > 0.1 * len(SEEDS), seen


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
def test_pages_of_fp8_are_vllms(version: str) -> None:
    interface = Witness(version).interface
    request = ProjectionRequest(64, kv_cache_dtype="fp8")
    (ours,) = project_layout(build_layers(build_attention(0)), request).specs
    quantized = {"dtype": DType("uint8", 1), "kv_quant_mode": interface.KVQuantMode.FP8_PER_TENSOR}
    spec = interface.FullAttentionSpec(block_size=64, num_kv_heads=8, head_size=64, **quantized)
    assert spec.page_size_bytes == ours.page_size == 65_536
    latent = interface.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, **quantized)
    (ours,) = project_layout(build_layers(build_mla(0)), request).specs
    assert latent.page_size_bytes == ours.page_size == 36_864


def test_rows_of_fp8_ds_mla_are_vllms() -> None:
    request = ProjectionRequest(64, kv_cache_dtype="fp8_ds_mla")
    (ours,) = project_layout(build_layers(build_mla(0)), request).specs
    fields = {"num_kv_heads": 1, "head_size": 576, "dtype": DType("uint8", 1)}
    spec = Witness("0.24.0").interface.MLAAttentionSpec(
        block_size=64, cache_dtype_str="fp8_ds_mla", **fields
    )
    assert spec.page_size_bytes == ours.page_size == 64 * 656
    # In 0.33 the layer says the bytes of a row.
    wheel = find_wheel("0.33.0")
    assert not isinstance(wheel, str)
    with zipfile.ZipFile(wheel) as archive:
        layer = archive.read("vllm/model_executor/layers/attention/mla_attention.py").decode()
    assert 'state_content_bytes={"fp8_ds_mla": 656,' in layer
    spec = Witness("0.33.0").interface.MLAAttentionSpec(
        block_size=64, state_content_bytes=656, **fields
    )
    assert spec.page_size_bytes == ours.page_size
