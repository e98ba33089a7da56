"""The table of docs/reliability.md: each command runs on an example of each danger."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from conftest import FIXTURES
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.helper import make_node
from test_growing_caches import build_growing_model
from tiers import thin

TOKEN = "vllmKvCache"
PAGE = FIXTURES.parent / "docs" / "reliability.md"
PLAIN = FIXTURES / "plain"


class Example(NamedTuple):
    """Files with one fault.

    Attributes:
        model: The model, or the directory of its windows.
        source: What it was renamed from; by default the model itself.
        decode: The other side of a hand-off; by default the model itself.
        options: What each command is given besides.
        compare_options: What ``compare`` is given besides.
    """

    model: Path
    source: Path | None = None
    decode: Path | None = None
    options: tuple[str, ...] = ()
    compare_options: tuple[str, ...] = ()


def load_decoder(tmp_path: Path, run) -> ModelProto:
    """A sound model with the consumer's token."""
    path = tmp_path / "sound.onnx"
    run(PLAIN / "decoder.onnx", "--prefix", TOKEN, "-o", path, "-q")
    return onnx.load(path)


def save(model: ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def rename_result(model: ModelProto, old: str, new: str) -> None:
    """Let a node of the main graph write its result under another name."""
    for node in model.graph.node:
        node.output[:] = [new if name == old else name for name in node.output]


def unpaired(tmp_path: Path, run) -> Example:
    model = load_decoder(tmp_path, run)
    for value in [v for v in model.graph.input if v.name.startswith("past_value.1")]:
        model.graph.input.remove(value)
    return Example(save(model, tmp_path / "model.onnx"))


def swapped(tmp_path: Path, run) -> Example:
    model = load_decoder(tmp_path, run)
    key, value = (f"past_{part}.0_{TOKEN}_RetainedState" for part in ("key", "value"))
    for old, new in ((key, "swap"), (value, key), ("swap", value)):
        rename_result(model, old, new)
    return Example(save(model, tmp_path / "model.onnx"))


def not_updated(tmp_path: Path, run) -> Example:
    model = load_decoder(tmp_path, run)
    output = f"past_key.0_{TOKEN}_RetainedState"
    rename_result(model, output, "dropped")
    passed_on = onnx.helper.make_node("Identity", [f"past_key.0_{TOKEN}"], [output])
    model.graph.node.insert(0, passed_on)
    return Example(save(model, tmp_path / "model.onnx"))


def feed_other(model: ModelProto, nodes: list[NodeProto], result: str) -> None:
    """Let the key of layer 0 be updated with the result of some nodes as its past."""
    key = f"past_key.0_{TOKEN}"
    for node in model.graph.node:
        if f"{key}_RetainedState" in node.output:
            node.input[:] = [result if name == key else name for name in node.input]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)


def copied(tmp_path: Path, run) -> Example:
    """The difference to the value is added to the key, so that the key is the value."""
    model = load_decoder(tmp_path, run)
    key, value = (f"past_{part}.0_{TOKEN}" for part in ("key", "value"))
    nodes = [make_node("Sub", [value, key], ["gap"]), make_node("Add", [key, "gap"], ["sum"])]
    feed_other(model, nodes, "sum")
    return Example(save(model, tmp_path / "model.onnx"))


def emptied(tmp_path: Path, run) -> Example:
    model = load_decoder(tmp_path, run)
    key = f"past_key.0_{TOKEN}"
    (value,) = (value for value in model.graph.input if value.name == key)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, dtype), "nothing"))
    feed_other(model, [make_node("Mul", [key, "nothing"], ["empty"])], "empty")
    return Example(save(model, tmp_path / "model.onnx"))


def cut_off(tmp_path: Path, run) -> Example:
    """The new key is appended, and the result is cut to the context from its first position on."""
    model = load_decoder(tmp_path, run)
    key = f"past_key.0_{TOKEN}"
    output = f"{key}_RetainedState"
    for name, number in (("start", 0), ("axis", 2)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
    nodes = model.graph.node
    (index,) = (number for number, node in enumerate(nodes) if output in node.output)
    new = nodes[index].input[2]
    nodes[index].CopyFrom(make_node("Slice", ["longer", "start", "end", "axis"], [output]))
    nodes.insert(index, make_node("Concat", [key, new], ["longer"], axis=2))
    nodes.insert(index, make_node("Shape", [key], ["end"], start=2, end=3))
    return Example(save(model, tmp_path / "model.onnx"))


def growing(tmp_path: Path, run) -> Example:
    into = f"past_{{part}}.{{layer}}_{TOKEN}"
    model = build_growing_model(into, f"{into}_RetainedState")
    return Example(save(model, tmp_path / "model.onnx"))


def few_axes(tmp_path: Path, run) -> Example:
    """A model of tables, with the names of a cache."""
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4])
        for part in ("key", "value")
        for name in (f"past_{part}.0_{TOKEN}", f"past_{part}.0_{TOKEN}_RetainedState")
    ]
    nodes = [make_node("Neg", [values[n].name], [values[n + 1].name]) for n in (0, 2)]
    graph = onnx.helper.make_graph(nodes, "tables", values[::2], values[1::2])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    return Example(save(model, tmp_path / "model.onnx"))


def left_state(tmp_path: Path, run) -> Example:
    """A state that each step replaces: nothing of its input is carried into its output."""
    model = onnx.load(PLAIN / "decoder.onnx")
    names = (("input", "xx_0"), ("output", "xx_0_r"), ("output", "seen"))
    for side, name in names:
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4])
        getattr(model.graph, side).append(value)
    model.graph.node.extend(
        [
            make_node("Shape", ["xx_0"], ["size"]),
            make_node("ConstantOfShape", ["size"], ["xx_0_r"]),
            make_node("Neg", ["xx_0"], ["seen"]),
        ]
    )
    path = save(model, tmp_path / "model.onnx")
    rules = tmp_path / "rules.toml"
    rules.write_text(run("pairs", path, "--as", "rules").out, "utf-8")
    assert run(path, "--rules", rules, "--prefix", TOKEN).code == 0
    return Example(path, options=("--rules", str(rules)))


def taken_name(tmp_path: Path, run) -> Example:
    """For each token of a column, a name that would change into one that is there already."""
    model = onnx.load(PLAIN / "decoder.onnx")
    for token in ("VLLM", TOKEN):
        tensor = numpy_helper.from_array(np.zeros(1, np.float32), f"past_key.0_{token}")
        model.graph.initializer.append(tensor)
    return Example(save(model, tmp_path / "model.onnx"))


def half_renamed(tmp_path: Path, run) -> Example:
    directory = tmp_path / "windows"
    shutil.copytree(PLAIN / "windows", directory)
    first = sorted(directory.glob("*/*.onnx"))[0]
    run(first, "--prefix", TOKEN, "-q")
    return Example(directory)


def lost_metadata(tmp_path: Path, run) -> Example:
    model = load_decoder(tmp_path, run)
    model.metadata_props.add(key="origin", value="elsewhere")
    return Example(save(model, tmp_path / "model.onnx"), source=PLAIN / "decoder.onnx")


def missed_data(tmp_path: Path, run) -> Example:
    path = tmp_path / "model" / "decoder.onnx"
    path.parent.mkdir()
    run(PLAIN / "external" / "decoder.onnx", "--prefix", TOKEN, "-o", path, "-q")
    for data in path.parent.glob("*.data"):
        data.unlink()
    return Example(path)


def stale_sidecar(tmp_path: Path, run) -> Example:
    path = Path(shutil.copy(PLAIN / "decoder.onnx", tmp_path / "model.onnx"))
    (tmp_path / "custom_io.yaml").write_text("- IOName: past_key.0\n  Precision: mxint8\n")
    run(path, "--prefix", TOKEN, "--sidecars", "off", "-q")
    return Example(path)


def unselected(tmp_path: Path, run) -> Example:
    return Example(PLAIN / "decoder.onnx")


def misnamed_logits(tmp_path: Path, run) -> Example:
    model = load_decoder(tmp_path, run)
    rename_result(model, "logits", "layer_0/logits")
    for value in model.graph.output:
        value.name = value.name.replace("logits", "layer_0/logits")
    return Example(save(model, tmp_path / "model.onnx"))


def cut_state(tmp_path: Path, run) -> Example:
    path = tmp_path / "model.onnx"
    run(PLAIN / "serving" / "hybrid.onnx", "--prefix", TOKEN, "-o", path, "-q")
    return Example(path)


def other_window(tmp_path: Path, run) -> Example:
    paths = []
    for name in ("window_whole", "window"):
        paths.append(tmp_path / f"{name}.onnx")
        run(PLAIN / "serving" / f"{name}.onnx", "--prefix", TOKEN, "-o", paths[-1], "-q")
    return Example(paths[0], decode=paths[1])


def turned(tmp_path: Path, run) -> Example:
    """On decode, batch and context have changed places."""
    model = load_decoder(tmp_path, run)
    path = save(model, tmp_path / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("past_"):
            dims = value.type.tensor_type.shape.dim
            dims[0].dim_param, dims[2].dim_param = dims[2].dim_param, dims[0].dim_param
    return Example(path, decode=save(model, tmp_path / "decode.onnx"))


def paged(tmp_path: Path, run) -> Example:
    """The caches are pools of blocks of all sequences."""
    model = load_decoder(tmp_path, run)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("past_"):
            dims = value.type.tensor_type.shape.dim
            dims[0].dim_param, dims[2].dim_param = "total_num_kv_blocks", "kv_block_size"
    return Example(save(model, tmp_path / "model.onnx"))


DANGERS: dict[str, Callable[..., Example]] = {
    "a retained output without its input": unpaired,
    "a buffer computed from another one's input": swapped,
    "values of another buffer written or added into a buffer": copied,
    "a buffer that a constant condition or a product with 0 empties": emptied,
    "new positions that are appended and cut off again": cut_off,
    "a buffer that nothing writes to": not_updated,
    "a cache that grows": growing,
    "a value with too few axes for a cache": few_axes,
    "a state that the rules of `pairs` leave without the token": left_state,
    "a new name that is taken": taken_name,
    "a set of windows of which some are renamed": half_renamed,
    "bytes other than names differ from the source": lost_metadata,
    "external data that are not there": missed_data,
    "a sidecar with the names from before": stale_sidecar,
    "names that the consumer does not select": unselected,
    "logits that the consumer does not find by their name": misnamed_logits,
    "a buffer that the consumer cuts": cut_state,
    "a paged cache": paged,
    "axes in another order on the other side": turned,
    "a window on one side, the whole context on the other": other_window,
}


def build_command(column: str, example: Example, tmp_path: Path) -> list[object]:
    """Return the arguments of a command on an example."""
    model, single = example.model, not example.model.is_dir()
    target = ["-o", tmp_path / "renamed.onnx"] if single else ["-d", tmp_path / "renamed"]
    rename: list[object] = [model, "--prefix", "VLLM", "--replace", *target]
    commands: dict[str, list[object]] = {
        "rename": rename,
        "rename --verify": [*rename, "--verify"],
        "rename --target": [model, "--target", "vllm-qaic", *target],
        "verify": ["verify", model],
        "verify --renamed-from": ["verify", model, "--renamed-from", example.source or model],
        "verify --target": ["verify", model, "--target", "vllm-qaic"],
        "compare": ["compare", model, example.decode or model, *example.compare_options],
    }
    return [*commands[column], *example.options]


def read_table() -> list[tuple[str, str, str]]:
    """Return danger, command and cell for each cell of the page's table."""
    section = PAGE.read_text("utf-8").partition("## What each command proves\n")[2]
    lines = re.findall(r"^\|(.*)\|$", section.partition("\n## ")[0], re.MULTILINE)
    heading, _, *rows = ([cell.strip(" `") for cell in line.split("|")] for line in lines)
    return [
        (row[0], column, cell)
        for row in rows
        for column, cell in zip(heading[1:], row[1:], strict=True)
    ]


CELLS = read_table()


def test_every_danger_of_the_page_has_an_example() -> None:
    assert [*dict.fromkeys(danger for danger, _, _ in CELLS)] == [*DANGERS]


@pytest.mark.parametrize(("danger", "column", "cell"), thin(CELLS, 25))
def test_a_command_finds_exactly_the_dangers_that_the_page_says(
    danger: str, column: str, cell: str, tmp_path: Path, run
) -> None:
    if cell == "-":
        pytest.skip("the command is not about this")
    outcome = run(*build_command(column, DANGERS[danger](tmp_path, run), tmp_path))
    said = set(re.findall(r"(?:error|warning) (KV[0-9]{3})", outcome.err + outcome.out))
    codes = set(re.findall("KV[0-9]{3}", " ".join(c for d, _, c in CELLS if d == danger)))
    if cell == "no":
        assert not said & codes
    else:
        assert set(re.findall("KV[0-9]{3}", cell)) <= said
        assert re.fullmatch(r"KV\d+|\(KV\d+\)", cell)
        assert (outcome.code == 1) is cell.startswith("KV")
