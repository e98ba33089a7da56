"""Random models against an independent reference; ``python -m tests.soak`` tries many more."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from conftest import Sample
from faults import fuzz_reference
from faults.fuzz_models import fuzz_model
from faults.fuzz_reference import damage_bytes, find_mistake

SEEDS = range(150)


def test_a_random_model_is_renamed_as_the_reference_says_and_comes_back(sample: Sample) -> None:
    verdicts: Counter[str] = Counter()
    seeds = sample(SEEDS, 30)
    for seed in seeds:
        verdict, mistake = find_mistake(fuzz_model(seed))
        assert mistake is None, seed
        verdicts[verdict] += 1
    assert verdicts["renamed"] > len(seeds) // 2


@pytest.mark.parametrize("damage", ["records", "bytes"])
def test_a_damaged_model_is_refused_or_renamed_as_the_reference_says(
    damage: str, sample: Sample
) -> None:
    verdicts: Counter[str] = Counter()
    seeds = sample(SEEDS, 50)
    for seed in seeds:
        if damage == "records":
            raw = fuzz_model(seed, damage=1 + seed % 3)
        else:
            raw = damage_bytes(fuzz_model(seed, odd_form=False), Random(seed))
        verdict, mistake = find_mistake(raw)
        assert mistake is None, seed
        verdicts[verdict] += 1
    assert min(verdicts["renamed"], verdicts["refused"]) > len(seeds) // 20


def test_the_reference_finds_a_result_with_one_wrong_name(monkeypatch) -> None:
    def forget(raw: bytes, *args: Any, **kwargs: Any) -> bytes:
        old, new = b"past_value.0_VLLM_Retained", b"past_valu3.0_VLLM_Retained"
        return real(raw, *args, **kwargs).replace(old, new)

    real = fuzz_reference.rename_bytes
    monkeypatch.setattr(fuzz_reference, "rename_bytes", forget)
    mistakes = [find_mistake(fuzz_model(seed))[1] for seed in range(20)]
    assert any(mistakes)
