"""Files that are no models, or models that set a trap: each is refused in one line, or handled.

A case writes ``m.onnx``, and what lies beside it, into a directory. It is *refused* if a rename
must not take it, and *handled* if it must.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import models
import onnx
from models import KEY, KEY_OUT, decoder, field, info, node, tensor, varint
from onnx import ModelProto, TensorProto

DATA = bytes(range(64))


class Case(NamedTuple):
    """A hostile file.

    Attributes:
        name: What it is.
        write: Writes it, and what lies beside it, into a directory.
        refused: Whether a rename must refuse it.
        says: A text that must be in the message.
        in_place: Whether only the file itself must not be written: its result can go elsewhere.
    """

    name: str
    write: Callable[[Path], object]
    refused: bool
    says: str = ""
    in_place: bool = False

    def __str__(self) -> str:
        return self.name


def list_cases() -> Iterator[Case]:
    """Yield all cases."""
    for name, data, says in CONTAINERS:
        yield Case(f"container: {name}", lambda d, data=data: save(d, data), True, says)
    plain = bytes(decoder().SerializeToString())
    for name, broken in models.BROKEN.items():
        yield Case(f"wire: {name}", lambda d, tail=broken: save(d, plain + tail), True)
    for name, data in WIRE_REFUSED.items():
        yield Case(f"wire: {name}", lambda d, data=data: save(d, data), True)
    for name, data in WIRE_HANDLED.items():
        yield Case(f"wire: {name}", lambda d, data=data: save(d, data), False)
    for depth, refused in ((32, False), (34, True), (400, True)):
        yield Case(f"depth: {depth} subgraphs", lambda d, n=depth: save(d, nested(n)), refused)
    for name in NAMES:
        yield Case(f"name: {name[:20]!a}", lambda d, name=name: save(d, with_name(name)), False)
    for name, model in GRAPHS_REFUSED.items():
        yield Case(f"graph: {name}", lambda d, model=model: save(d, model()), True)
    for name, model in GRAPHS_HANDLED.items():
        yield Case(f"graph: {name}", lambda d, model=model: save(d, model()), False)
    for location in LOCATIONS_REFUSED:
        yield Case(
            f"location: {location[:30]!a}",
            lambda d, location=location: save_external(d, location=location),
            True,
        )
    for location in LOCATIONS_HANDLED:
        yield Case(
            f"location: {location!a}",
            lambda d, location=location: save_external(d, location=location),
            False,
        )
    for key, value in EXTENTS_REFUSED:
        yield Case(
            f"extent: {key} {value[:20]!a}",
            lambda d, key=key, value=value: save_external(d, **{key: value}),
            True,
        )
    for key, value in EXTENTS_HANDLED:
        yield Case(
            f"extent: {key} {value!a}",
            lambda d, key=key, value=value: save_external(d, **{key: value}),
            False,
        )
    for name, lay in DATA_FILES_REFUSED.items():
        yield Case(f"data file: {name}", lambda d, lay=lay: (save_external(d), lay(d)), True)
    for name, lay in DATA_FILES_HANDLED.items():
        yield Case(f"data file: {name}", lambda d, lay=lay: (save_external(d), lay(d)), False)
    for name, lay in LINKED_MODELS.items():
        yield Case(
            f"model file: {name}", lambda d, lay=lay: (save(d, PLAIN), lay(d)), True, "", True
        )
    for name, lay in MODEL_FILES_REFUSED.items():
        yield Case(f"model file: {name}", lambda d, lay=lay: (save(d, plain), lay(d)), True)


def save(directory: Path, model: bytes | ModelProto) -> None:
    """Write ``m.onnx``."""
    models.saved(model, directory / "m.onnx")


# Containers


def pack_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m.onnx", decoder().SerializeToString())
    return buffer.getvalue()


PLAIN = bytes(decoder().SerializeToString())
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
CONTAINERS = (
    ("empty", b"", ""),
    ("one byte", b"\n", ""),
    ("zeros", bytes(64), ""),
    ("text", b"Hello, this is not a model.\n" * 4, ""),
    ("an HTML page", b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    ("a Git LFS pointer", LFS, "LFS"),
    ("a zip", pack_zip(), ""),
    ("gzip", gzip.compress(PLAIN), ""),
    ("safetensors", struct.pack("<Q", 20) + b'{"__metadata__": {}}', ""),
    ("GGUF", b"GGUF\x03\0\0\0" + bytes(32), ""),
    ("pickle", pickle.dumps({"weights": [1.0] * 9}), ""),
    ("a tensor", tensor("w", 1.0).SerializeToString(), ""),
    ("a graph", decoder().graph.SerializeToString(), ""),
    ("half a model", PLAIN[: len(PLAIN) // 2], ""),
    ("a model without its last byte", PLAIN[:-1], ""),
    ("garbage behind", PLAIN + b"\xff" * 16, ""),
    ("two models", PLAIN + PLAIN, ""),
    ("ONNX as text", b'ir_version: 10\ngraph {\n  name: "main"\n}\n', ""),
    ("an ORT model", b"\x18\0\0\0ORTM" + bytes(64), ""),
    ("a pickle that runs code", b"cos\nsystem\n(S'touch trace'\ntR.", ""),
)


# The wire


GRAPH = bytes(decoder().graph.SerializeToString())
HEAD = field(1, 10) + field(8, field(2, 18))
WIRE_REFUSED = {
    "a second graph": PLAIN + field(7, GRAPH),
    "a graph that is a number": HEAD + field(7, 5),
    "a length that no field has": HEAD + b"\x3a" + varint((1 << 64) - 1) + GRAPH,
}
WIRE_HANDLED = {
    "a name that is not UTF-8": HEAD + field(7, GRAPH.replace(KEY.encode(), b"past_key\xff0")),
    "fields in another order": models.written(decoder(), backwards=True),
    "long lengths": models.written(decoder(), width=5),
    "unknown fields": PLAIN + field(5000, b"more"),
    "a group that nobody knows": PLAIN + models.OPEN + field(1, 1) + models.CLOSE,
    "the producer twice": PLAIN + field(2, "first") + field(2, "last"),
}


# Depth, names, graphs


def nested(depth: int) -> bytes:
    """A model with subgraphs in subgraphs, written without recursion."""
    body = field(1, node("Identity", [KEY], ["y"]).SerializeToString())
    for _ in range(depth):
        attribute = field(1, "body") + field(6, body) + field(20, 5)
        body = field(1, field(1, KEY) + field(2, "z") + field(4, "If") + field(5, attribute))
    return HEAD + field(7, GRAPH + body)


NAMES = (
    *("\0", "a\nb", "\n::error::x", "::stop-commands::x", "##[error]x", "\x1b[2J", "\x1b]0;x\x07"),
    *("\x1b]52;c;eA==\x07", "\x9b2J", "\x90q", "[red]", "[/red]", ":smiley:", "back\\"),
    *("\u202etxt", "\u2066x\u2069", "\u200b", "\U000e0041", "e\u0301", "\u00e9", "\u0430"),
    *("%s{0}", "$(id)", "`id`", "--help", "../../x", "a" + "\u0301" * 10_000, "n" * 20_000),
)


def with_name(name: str) -> ModelProto:
    """A model in which a buffer's scope, an output, a node and an operator have this name."""
    model = decoder()
    scope = "".join(character for character in name if character != "/")
    for value in (model.graph.input[1], model.graph.output[1]):
        value.name = f"{scope}/{value.name}"
    for each in model.graph.node:
        each.input[:] = [
            f"{scope}/{part}" if part.startswith("past_key") else part for part in each.input
        ]
        each.output[:] = [
            f"{scope}/{part}" if part.startswith("past_key") else part for part in each.output
        ]
    model.graph.output.append(info(name, "::error::x"))
    model.graph.node.append(onnx.helper.make_node("Identity", ["x"], [name], name=name))
    model.graph.name = model.doc_string = model.producer_name = name
    model.metadata_props.add(key=name, value=name)
    return model


def change(edit: Callable[[ModelProto], object]) -> Callable[[], ModelProto]:
    def build() -> ModelProto:
        model = decoder()
        edit(model)
        return model

    return build


GRAPHS_REFUSED = {
    "no graph": lambda: ModelProto(ir_version=10),
    "no operator set": change(lambda model: model.ClearField("opset_import")),
    "an input twice": change(lambda model: model.graph.input.append(info(KEY))),
    "an output twice": change(lambda model: model.graph.output.append(info(KEY_OUT))),
    "a new name that is a weight": change(
        lambda model: model.graph.initializer.append(tensor(f"{KEY}_VLLM", 1.0))
    ),
    "a new name that a node produces": change(
        lambda model: model.graph.node.append(node("Identity", ["x"], [f"{KEY}_VLLM"]))
    ),
    "a new name in a subgraph": change(
        lambda model: model.graph.node.append(
            models.branch(models.graph(node("Identity", [KEY], [f"{KEY}_VLLM"])))
        )
    ),
    "an output that is not there": change(lambda model: model.graph.output.pop()),
    "two keys for a layer": change(
        lambda model: (
            model.graph.input.append(info(f"a/{KEY}")),
            model.graph.output.append(info(f"a/{KEY_OUT}")),
        )
    ),
}
GRAPHS_HANDLED = {
    "operator set 10^9": change(lambda model: setattr(model.opset_import[0], "version", 10**9)),
    "a similar name": change(
        lambda model: model.graph.node.append(node("Identity", ["x"], [f"{KEY}_VLLMX"]))
    ),
    "an input that is an output": change(lambda model: model.graph.output.append(info(KEY))),
    "a captured name": change(
        lambda model: model.graph.node.append(
            models.branch(models.graph(node("Identity", [KEY], ["seen"])))
        )
    ),
    "an enum that nobody knows": change(
        lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 999)
    ),
    "a million in a dimension": change(
        lambda model: model.graph.value_info.append(info("y", (1 << 62)))
    ),
}


# External data


LOCATIONS_REFUSED = (
    *("../x", "a/../../x", "/etc/hostname", "C:\\x", "C:/x", "\\\\host\\share", "~/x", "~root/x"),
    *("file:///x", "", ".", "a\0b", "x" * 5_000, "m.onnx", "./m.onnx", "missing.bin"),
    *("sub/../m.onnx", "a\nb", "\x1b[2J", "w.bin/x"),
)
LOCATIONS_HANDLED = ("w.bin", "./w.bin", "w..bin", "sub/w.bin", "sub//w.bin")
EXTENTS_REFUSED = (
    *(("offset", text) for text in ("-1", "1e3", "1_0", "\u0661\u0662", " 5", "+5", "65", "0x1")),
    *(("length", text) for text in ("-1", "1125899906842624", "65", "1.0", "9" * 5_000)),
    ("offset", "9" * 5_000),
)
EXTENTS_HANDLED = (("offset", "0"), ("length", "64"), ("checksum", "abc"), ("__class__", "x"))


def save_external(directory: Path, **entries: str) -> None:
    """Write a model whose weights lie in ``w.bin``, with other entries for their place."""
    model = decoder()
    weight = model.graph.initializer.add(name="w", dims=[len(DATA)], data_type=TensorProto.UINT8)
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", **entries}.items():
        weight.external_data.add(key=key, value=value)
    (directory / "sub").mkdir()
    for name in ("w.bin", "w..bin", "sub/w.bin"):
        (directory / name).write_bytes(DATA)
    save(directory, model)


def lay_in_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that replaces ``w.bin`` by something else."""

    def lay(directory: Path) -> None:
        path = directory / "w.bin"
        path.rename(directory / "real.bin")
        make(path)

    return lay


def bind_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a path for a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


DATA_FILES_HANDLED = {
    "a symbolic link": lay_in_place(lambda path: path.symlink_to("real.bin")),
    "a hard link": lay_in_place(lambda path: os.link(path.parent / "real.bin", path)),
}
DATA_FILES_REFUSED = {
    "a dangling link": lay_in_place(lambda path: path.symlink_to("nowhere")),
    "a loop of links": lay_in_place(lambda path: path.symlink_to("w.bin")),
    "a link to outside": lay_in_place(lambda path: path.symlink_to("/etc/hostname")),
    "a pipe": lay_in_place(lambda path: os.mkfifo(path)),
    "a directory": lay_in_place(Path.mkdir),
    "a socket": lay_in_place(bind_socket),
    "a device": lay_in_place(lambda path: path.symlink_to("/dev/zero")),
    "missing": lay_in_place(lambda path: None),
    "too short": lay_in_place(lambda path: path.write_bytes(DATA[:-1])),
}


def replace_model(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def lay(directory: Path) -> None:
        path = directory / "m.onnx"
        path.rename(directory / "real")
        make(path)

    return lay


LINKED_MODELS = {
    "a symbolic link": replace_model(lambda path: path.symlink_to("real")),
    "a hard link": replace_model(lambda path: os.link(path.parent / "real", path)),
}
MODEL_FILES_REFUSED = {
    "a pipe": replace_model(lambda path: os.mkfifo(path)),
    "a directory's link": replace_model(
        lambda path: (path.with_name("empty").mkdir(), path.symlink_to("empty"))
    ),
    "a device": replace_model(lambda path: path.symlink_to("/dev/zero")),
    "a socket": replace_model(bind_socket),
    "a dangling link": replace_model(lambda path: path.symlink_to("nowhere")),
    "a loop of links": replace_model(lambda path: path.symlink_to("m.onnx")),
    "sparse, 8 GiB": replace_model(lambda path: (path.touch(), os.truncate(path, 8 << 30))),
}
