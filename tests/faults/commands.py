"""Every command line that writes, with the files it works on.

The files are small and made here. A case has a directory of its own, ``here``, in which the
command runs; what lies beside it belongs to others and must never change.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import models
import onnx.helper
import qefficient_exports
from window_sets import write_windows

from onnxkvrename import rename_bytes

WEIGHTS = bytes(range(256)) * 64
SIDECAR = "".join(
    f" - IOName: {name}\n   Precision: float16\n"
    for name in (models.KEY, models.KEY_OUT, models.VALUE, models.VALUE_OUT)
)


def build_model(*, external: bool = False) -> bytes:
    """A decoder with weights, in the model or in ``w.bin`` beside it."""
    proto = models.decoder()
    weight = proto.graph.initializer.add(name="w", dims=[len(WEIGHTS)], data_type=2)
    if external:
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="w.bin")
    else:
        weight.raw_data = WEIGHTS
    return bytes(proto.SerializeToString())


INSIDE, BESIDE = build_model(), build_model(external=True)


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    """Write files below a directory."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def prepare(**files: bytes) -> Callable[[Path], None]:
    """Return a function that writes these files; ``__`` stands for a slash, ``_0`` for a dot."""
    named = {name.replace("__", "/").replace("_0", "."): data for name, data in files.items()}
    return lambda directory: write_files(directory, named)


one = prepare(m_0onnx=INSIDE)
one_renamed = prepare(m_0onnx=rename_bytes(INSIDE, "VLLM"))
with_data = prepare(in__m_0onnx=BESIDE, in__w_0bin=WEIGHTS)
three = prepare(in__m_0onnx=BESIDE, in__n_0onnx=INSIDE, in__sub__o_0onnx=INSIDE, in__w_0bin=WEIGHTS)
three_renamed = prepare(
    in__m_0onnx=rename_bytes(BESIDE, "VLLM"),
    in__n_0onnx=rename_bytes(INSIDE, "VLLM"),
    in__w_0bin=WEIGHTS,
)
with_sidecars = prepare(
    in__m_0onnx=BESIDE, in__w_0bin=WEIGHTS, in__custom_io_0yaml=SIDECAR.encode()
)


def three_with_old(directory: Path) -> None:
    three(directory)
    write_files(directory, {"out/note": b"old"})


def three_over_old(directory: Path) -> None:
    three_with_old(directory)
    write_files(directory, {"out/m.onnx": b"old", "out/w.bin": b"old", "out/sub/o.onnx": b"old"})


def with_place(directory: Path) -> None:
    with_data(directory)
    write_files(directory, {"out/note": b"old"})


def over_place(directory: Path) -> None:
    with_data(directory)
    write_files(directory, {"out/m.onnx": b"old", "out/w.bin": b"old"})


def windows(directory: Path) -> None:
    write_windows(directory / "in", 3, weights=1024)


def windows_renamed(directory: Path) -> None:
    write_windows(directory / "in", 3, weights=1024, token="OTHER")


def windows_half_renamed(directory: Path) -> None:
    windows(directory)
    write_windows(directory / "new", 3, weights=1024, token="VLLM")
    name = "layer_1_2/Tiny_layer_tmp_1_2.onnx"
    (directory / "new" / name).replace(directory / "in" / name)
    shutil.rmtree(directory / "new")


def windows_over_results(directory: Path) -> None:
    windows(directory)
    write_windows(directory / "out", 3, weights=1024, token="OTHER")


def with_two_sidecars(directory: Path) -> None:
    """A model as transformers names its caches, with both kinds of configuration beside it."""
    caches = [(f"past_key_values.{n}", f"present.{n}") for n in ("0.key", "0.value")]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [
                models.node("Neg", ["x"], ["logits"]),
                *(models.node("Add", [past, "x"], [present]) for past, present in caches),
            ],
            "main",
            [models.info("x", 2), *(models.info(past, 1, 1, 2) for past, _ in caches)],
            [models.info("logits", 2), *(models.info(present, 1, 1, 2) for _, present in caches)],
        )
    )
    inputs = {f"past_{part}_names": f"past_key_values.%d.{part}" for part in ("key", "value")}
    outputs = {f"present_{part}_names": f"present.%d.{part}" for part in ("key", "value")}
    names = {"inputs": inputs, "outputs": outputs}
    config = {"model": {"decoder": {"filename": "model.onnx", **names}}, "search": {}}
    texts = (f" - IOName: {name}\n   Precision: float16\n" for pair in caches for name in pair)
    files = {
        "in/model.onnx": model.SerializeToString(),
        "in/genai_config.json": json.dumps(config, indent=4).encode(),
        "in/custom_io.yaml": "".join(texts).encode(),
    }
    write_files(directory, files)


def two_sides(directory: Path) -> None:
    renamed = rename_bytes(INSIDE, "vllmKvCache")
    write_files(directory, {"p.onnx": renamed, "d.onnx": renamed})


def two_sides_with_page(directory: Path) -> None:
    two_sides(directory)
    write_files(directory, {"a.html": b"<html></html>"})


def linked(directory: Path) -> None:
    write_files(directory, {"real/m.onnx": INSIDE})
    (directory / "m.onnx").symlink_to("real/m.onnx")


def export(directory: Path) -> None:
    qefficient_exports.write_export(directory / "cache")


def export_renamed(directory: Path) -> None:
    qefficient_exports.write_export(directory / "cache", token="VLLM")


def with_old_outputs(directory: Path) -> None:
    one(directory)
    write_files(directory, {"out.json": b"{}", "out.yaml": b"- old", "a.html": b"<html></html>"})
    write_files(directory, {"a.html": b"<html></html>"})


class Command(NamedTuple):
    """A command line that writes.

    Attributes:
        name: What it does.
        args: Its arguments; paths are relative to the working directory.
        prepare: Writes the files it works on.
    """

    name: str
    args: str
    prepare: Callable[[Path], None]

    def __str__(self) -> str:
        return self.name


COMMANDS = (
    Command("in place", "m.onnx --prefix VLLM", one),
    Command("in place with data", "in/m.onnx --prefix VLLM", with_data),
    Command("in place with a sidecar", "in --prefix VLLM", with_sidecars),
    Command("a set in place", "in --prefix VLLM", windows),
    Command("three in place", "in --prefix VLLM", three),
    Command("three stripped", "in --strip", three_renamed),
    Command("a set replaced", "in --prefix VLLM --replace", windows_renamed),
    Command("a set stripped", "in --strip", windows_renamed),
    Command("a set completed", "in --prefix VLLM", windows_half_renamed),
    Command("with two sidecars", "in --prefix VLLM", with_two_sidecars),
    Command("stripped", "m.onnx --strip", one_renamed),
    Command("replaced", "m.onnx --prefix OTHER --replace", one_renamed),
    Command("through a link", "m.onnx --prefix VLLM --force", linked),
    Command("to a file", "in/m.onnx --prefix VLLM -o out/m.onnx", with_place),
    Command("to a new directory's file", "in/m.onnx --prefix VLLM -o new/m.onnx", with_data),
    Command("over a file", "in/m.onnx --prefix VLLM -o out/m.onnx --force", over_place),
    Command("a set to a directory", "in --prefix VLLM -d out", three_with_old),
    Command("a set to a new directory", "in --prefix VLLM -d new/dir", three),
    Command("a set over a directory", "in --prefix VLLM -d out --force", three_over_old),
    Command("a set over earlier results", "in --prefix VLLM -d out --force", windows_over_results),
    Command("with a sidecar to a directory", "in --prefix VLLM -d out", with_sidecars),
    Command("seeded", "cache --prefix VLLM --seed-cache", export),
    Command("stripped in the cache", "cache --strip --seed-cache", export_renamed),
    Command("a page", "inspect m.onnx --html a.html", one),
    Command("over a page", "inspect m.onnx --html a.html --force", with_old_outputs),
    Command("a page of two sides", "compare p.onnx d.onnx --html a.html", two_sides),
    Command(
        "over a page of two sides",
        "compare p.onnx d.onnx --html a.html --force",
        two_sides_with_page,
    ),
)
