"""The generator of random models: valid where it says so, varied, and the same for a seed."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from faults.fuzz_models import build_random_model, fuzz_model, write_message
from faults.fuzz_reference import is_readable
from models import every
from onnx import ModelProto

from onnxkvrename.api.memory import rename_bytes
from onnxkvrename.errors import KvRenameError

SEEDS = range(60)


def test_every_form_of_a_model_reads_the_same():
    for seed in SEEDS:
        random = Random(seed)
        model = build_random_model(random, 2)
        read = ModelProto.FromString(write_message(model, random))
        read.DiscardUnknownFields()
        assert read == model


def test_a_seed_always_gives_the_same_bytes():
    assert fuzz_model(7, damage=3) == fuzz_model(7, damage=3)
    assert len({fuzz_model(seed) for seed in SEEDS}) == len(SEEDS)


def test_every_message_of_onnx_occurs():
    kinds = {type(item).__name__ for seed in range(200) for item in every(read(seed))}
    assert {"GraphProto", "TrainingInfoProto", "FunctionProto", "SparseTensorProto"} <= kinds
    assert {"ShardingSpecProto", "TensorAnnotation", "TypeProto", "Map", "Opaque"} <= kinds


def read(seed: int) -> ModelProto:
    return ModelProto.FromString(fuzz_model(seed))


def test_most_models_are_renamed():
    renamed = 0
    for model in map(fuzz_model, SEEDS):
        with suppress(KvRenameError):
            renamed += rename_bytes(model, "VLLM") != model
    assert renamed > len(SEEDS) // 2


def test_damage_leaves_some_models_readable_and_some_not():
    readable = [is_readable(fuzz_model(seed, damage=1)) for seed in SEEDS]
    assert 5 < sum(readable) < len(readable) - 5
