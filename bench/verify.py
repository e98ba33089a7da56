"""What `verify` costs next to onnx-graphsurgeon's import: `python bench/verify.py`.

Three graphs of 100,000 nodes without weights: the decoder of the other benchmarks; the same one
with two buffers exchanged, so that the proof fails and visits every node; and one whose nodes are
all on the path of a buffer. Each run is a process of its own, and the two commands take turns.
Printed are the medians of all rounds, the ratio of the wall times and that of the CPU times.

Needs onnx-graphsurgeon: in the same environment, or in that of `--python`.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import decoder
import onnx
from machine import describe
from onnx import TensorProto, helper

BENCH = Path(__file__).resolve().parent
LIMIT = 1.5
"""The most that `verify` may take, in times of the import."""
VERSIONS = """
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in ("onnx-graphsurgeon", "onnx", "protobuf")))
"""
IMPORT = """
import sys
import onnx
import onnx_graphsurgeon
onnx_graphsurgeon.import_onnx(onnx.load(sys.argv[1]))
"""
Run = tuple[float, float, float]


def write_graphs(directory: Path, node_count: int, layers: int) -> Iterator[tuple[str, Path]]:
    """Write the three graphs; yield a title and a path for each."""
    path = directory / "decoder.onnx"
    decoder.write(path, decoder.Decoder(layers, nodes=node_count), seed=0)
    yield "decoder", path
    model = onnx.load(path)
    exchange_outputs(model, "past_key.0_RetainedState", "past_key.1_RetainedState")
    onnx.save(model, directory / "exchanged.onnx")
    yield "decoder, two buffers exchanged", directory / "exchanged.onnx"
    onnx.save(build_long_paths(node_count, layers), directory / "paths.onnx")
    yield "every node on the path of a buffer", directory / "paths.onnx"


def exchange_outputs(model: onnx.ModelProto, first: str, second: str) -> None:
    """Let the nodes that make two values make each other's."""
    names = {first: second, second: first}
    for node in model.graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]


def build_long_paths(node_count: int, layers: int) -> onnx.ModelProto:
    """A model in which each output is computed from its input by a long chain of operators."""
    inputs = [build_value("x")]
    nodes, outputs = [], []
    for name in (f"past_{part}.{layer}" for layer in range(layers) for part in ("key", "value")):
        value = name
        length = node_count // (2 * layers)
        for number, op_type in enumerate(islice(cycle(("Mul", "Tanh", "Add", "Neg")), length)):
            operands = [value, "x"] if op_type in ("Mul", "Add") else [value]
            value = f"/model/{name}/{op_type}_{number}_output_0"
            nodes.append(helper.make_node(op_type, operands, [value], name=value))
        nodes[-1].output[0] = f"{name}_RetainedState"
        inputs.append(build_value(name))
        outputs.append(build_value(f"{name}_RetainedState"))
    graph = helper.make_graph(nodes, "paths", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def build_value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch_size", 2, "ctx_len", 64])


def measure(command: list[str], log: Path, allowed: tuple[int, ...] = (0,)) -> Run:
    """Run a command once; return wall seconds, CPU seconds and peak megabytes."""
    helper_command = [sys.executable, "-I", "-S", str(BENCH / "measure.py"), str(log), *command]
    answer = subprocess.run(helper_command, capture_output=True, text=True, check=True).stdout
    code, wall, cpu, peak_kib = answer.split()
    if int(code) not in allowed:
        raise SystemExit(f"exit {code}: {' '.join(command)}\n{log.read_text()}")
    return float(wall), float(cpu), int(peak_kib) * 1024 / 1e6


def compare(path: Path, python: str, rounds: int) -> tuple[Run, Run]:
    """Return the medians of the import and of `verify`, after one round that fills caches."""
    imports, verifications = [], []
    log = path.with_suffix(".log")
    for _ in range(rounds + 1):
        imports.append(measure([python, "-c", IMPORT, str(path)], log))
        command = [sys.executable, "-m", "onnxkvrename", "verify", str(path)]
        verifications.append(measure(command, log, allowed=(0, 1)))
    return take_medians(imports[1:]), take_medians(verifications[1:])


def take_medians(runs: list[Run]) -> Run:
    wall, cpu, peak = (statistics.median(column) for column in zip(*runs, strict=True))
    return wall, cpu, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--python", default=sys.executable, help="runs the import")
    options = parser.parse_args()
    versions = subprocess.check_output([options.python, "-c", VERSIONS], text=True).strip()
    with tempfile.TemporaryDirectory() as directory:
        machine = describe(Path(directory))
        print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load'][0]}")
        print(f"{machine['kernel']}, Python {platform.python_version()}, {versions}")
        for title, path in write_graphs(Path(directory), options.nodes, options.layers):
            imported, verified = compare(path, options.python, options.rounds)
            print(f"{title}: {path.stat().st_size:,} bytes\n  wall s   CPU s     MB")
            for name, (wall, cpu, peak) in (("import", imported), ("verify", verified)):
                print(f"  {wall:6.2f}  {cpu:6.2f}  {peak:5.0f}  {name}")
            ratios = [verified[column] / imported[column] for column in (0, 1)]
            print(f"  ratio {ratios[0]:.2f} of wall, {ratios[1]:.2f} of CPU; at most {LIMIT}")


if __name__ == "__main__":
    main()
