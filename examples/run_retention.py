"""Run a model in onnxruntime as a device would: each retained output becomes its input again.

    python run_retention.py renamed.onnx
    python run_retention.py renamed.onnx --like model.onnx --steps 5 --dim ctx_len=64

Exit code 1 if an output does not fit into its input, or if the other model, such as the one
before a rename, gives different results for the same random inputs.
Requires onnxkvrename, onnxruntime and numpy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # an example does not report anything
import onnxruntime

import onnxkvrename

Step = list[tuple[str, np.ndarray]]
"""The outputs of a step, by name, in the order of the graph."""
DTYPES = {"float": "float32", "double": "float64"}
"""The dtypes that onnxruntime and numpy call by different names."""
SIZES = {"batch": 1, "seq": 1, "ctx": 32}
"""Sizes of symbolic dimensions by a part of their names; all others have four."""


def run_steps(path: str, steps: int, sizes: Mapping[str, int]) -> list[Step]:
    """Run a model step by step; the inputs besides buffers are random, but equal for each model."""
    pairs = onnxkvrename.verify(path).report.pairs
    inputs = {p.output.old_name: p.input.old_name for p in pairs if p.input and p.output}
    if not inputs:
        sys.exit(f"{path}: no KV buffer")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    random, fed, results = np.random.default_rng(0), dict[str, np.ndarray](), list[Step]()
    for _ in range(steps):
        for value in session.get_inputs():
            if value.name not in fed or value.name not in inputs.values():
                shape = [choose_size(dim, sizes) for dim in value.shape]
                dtype = value.type.removeprefix("tensor(").removesuffix(")")
                is_real = "float" in dtype or dtype == "double"
                drawn = random.standard_normal(shape) if is_real else random.integers(0, 2, shape)
                fed[value.name] = drawn.astype(DTYPES.get(dtype, dtype))
        names = [value.name for value in session.get_outputs()]
        results.append(list(zip(names, session.run(names, fed), strict=True)))
        for name, result in results[-1]:
            if name not in inputs:
                continue
            into = inputs[name]
            if result.shape != fed[into].shape:
                sys.exit(f"{path}: {name} is {result.shape}, {into} is {fed[into].shape}")
            fed[into] = result
    return results


def choose_size(dim: int | str | None, sizes: Mapping[str, int]) -> int:
    """Return the size of a dimension: one that is given, or a guess."""
    if isinstance(dim, int):
        return dim
    return next((size for part, size in {**SIZES, **sizes}.items() if part in str(dim)), 4)


def main() -> None:
    """Run one model, or two and compare them."""
    parser = argparse.ArgumentParser(description="Run the retention loop of a model.")
    parser.add_argument("model")
    parser.add_argument("--like", metavar="MODEL", help="a model that must give equal results")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dim", action="append", default=[], metavar="SYMBOL=SIZE")
    arguments = parser.parse_args()
    sizes = {symbol: int(size) for symbol, _, size in (dim.partition("=") for dim in arguments.dim)}
    results = run_steps(arguments.model, arguments.steps, sizes)
    expected = run_steps(arguments.like, arguments.steps, sizes) if arguments.like else results
    for number, (step, other) in enumerate(zip(results, expected, strict=True), start=1):
        for (name, result), (_, like) in zip(step, other, strict=True):
            if result.tobytes() != like.tobytes():
                sys.exit(
                    f"{arguments.model}: {name} differs from {arguments.like} in step {number}"
                )
    equal = f", bit for bit equal to {arguments.like}" if arguments.like else ""
    print(f"{arguments.model}: {arguments.steps} steps, every buffer fits into its input{equal}")


if __name__ == "__main__":
    main()
