"""External data that is swapped for a link to a file outside while it is copied."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from soak.parts import Part

ROUNDS = 200


def run(part: Part) -> None:
    """Race in rounds until the time is up."""
    if sys.platform != "linux":
        part.skipped = "needs Linux"
        return
    from soak import race_external_data as swapping

    with tempfile.TemporaryDirectory() as directory, swapping.open_as_before():
        root = Path(directory).resolve()
        outcomes = swapping.race(
            swapping.build_case(root), root, 10_000, stop_early=True, seed=part.seed
        )
        part.controls["a path that is judged, then opened"] = outcomes["FOREIGN"] > 0
    seed = part.seed
    while not part.is_over:
        seed += 1
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory).resolve()
            outcomes = swapping.race(
                swapping.build_case(root), root, ROUNDS, stop_early=False, seed=seed
            )
        part.cases.update(outcomes)
        if outcomes["FOREIGN"]:
            part.fail(f"seed {seed}: {outcomes['FOREIGN']} results have bytes from outside")
