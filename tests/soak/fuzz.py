"""Random and damaged models against an independent reference, with the undo as an oracle."""

from __future__ import annotations

from itertools import count
from random import Random

from faults import fuzz_reference
from faults.fuzz_models import fuzz_model
from faults.fuzz_reference import damage_bytes, find_mistake
from soak.parts import Part


def run(part: Part) -> None:
    """Try models until the time is up."""
    part.check_control("a result with one wrong name", (_check_with_wrong_name,))
    for seed in part.take(count(part.seed * 1_000_000_000)):
        raw = fuzz_model(seed)
        variants = {
            "valid": raw,
            "damaged records": fuzz_model(seed, damage=1 + seed % 3),
            "damaged bytes": damage_bytes(raw, Random(seed)),
        }
        for kind, data in variants.items():
            try:
                verdict, mistake = find_mistake(data)
            except Exception as error:
                verdict, mistake = "raised", f"{type(error).__name__}: {error}"
            part.cases[f"{kind}: {verdict}"] += 1
            if mistake is not None:
                part.fail(f"seed {seed}, {kind}: {mistake}")


def _check_with_wrong_name() -> None:
    real = fuzz_reference.rename_bytes
    fuzz_reference.rename_bytes = lambda *args, **kwargs: real(*args, **kwargs).replace(
        b"past_value.0_VLLM_Retained", b"past_valu3.0_VLLM_Retained"
    )
    try:
        assert not any(find_mistake(fuzz_model(seed))[1] for seed in range(20))
    finally:
        fuzz_reference.rename_bytes = real
