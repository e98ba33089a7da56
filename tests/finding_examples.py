"""An example of each finding: how the models are made, what is run on them, and what fixes it.

`findings_page.py` writes the finding that an example prints into docs/findings.md.
`python tests/finding_examples.py KV617` prints all that it prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import genai_folders
import onnx
import onnx.parser
from cache_models import build_cache_model
from exporter_models import (
    Cache,
    build_decoder,
    build_model,
    build_static_decoder,
    list_caches,
)
from onnx import ModelProto
from qefficient_exports import build_merged, write_export
from window_sets import build_window, write_windows

from onnxkvrename.cli.main import main

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
TOKENS = ("vllmKvCache", "vllmKvCache")


class Example(NamedTuple):
    """What shows a finding, in a directory with a copy of the fixtures.

    Attributes:
        commands: Command lines, each without the name of the program; the last one shows it.
        fix: Command lines that are run after these, of which none shows it.
        make: Makes the files.
    """

    commands: tuple[str, ...]
    fix: tuple[str, ...]
    make: Callable[[], None] | None


EXAMPLES: dict[str, Example] = {}


def show(
    code: str, *commands: str, fix: tuple[str, ...] = ()
) -> Callable[[Callable[[], None]], None]:
    """Take the decorated function as what makes the files of an example."""
    EXAMPLES[code] = Example(commands, fix, None)

    def add(make: Callable[[], None]) -> None:
        EXAMPLES[code] = Example(commands, fix, make)

    return add


def show_decoder(
    code: str, *commands: str, fix: tuple[str, ...] = ()
) -> Callable[[Callable[[ModelProto], None]], None]:
    """Take the decorated function as what changes the fixtures' decoder into model.onnx."""

    def add(change: Callable[[ModelProto], None]) -> None:
        def make() -> None:
            model = onnx.load("fixtures/plain/decoder.onnx")
            change(model)
            onnx.save(model, "model.onnx")

        EXAMPLES[code] = Example(commands, fix, make)

    return add


def make_files(code: str) -> None:
    """Make the files of an example in the working directory."""
    shutil.copytree(FIXTURES, "fixtures")
    make = EXAMPLES[code].make
    if make is not None:
        make()


def run_example(code: str) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return what the commands of an example and those of its fix print, and their exit codes."""
    example = EXAMPLES[code]
    before = Path.cwd()
    directory = Path(tempfile.mkdtemp()).resolve()
    try:
        os.chdir(directory)
        make_files(code)
        return run_commands(example.commands), run_commands(example.fix)
    finally:
        os.chdir(before)
        shutil.rmtree(directory)


def run_commands(commands: tuple[str, ...]) -> tuple[str, int]:
    """Return what commands print, and the exit code of the last one."""
    stream, code = io.StringIO(), 0
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        for command in commands:
            code = main([*shlex.split(command), "-q"])
    return stream.getvalue().replace(f"{Path.cwd()}", "/home/me"), code


def find_node(model: ModelProto, output: str) -> onnx.NodeProto:
    """Return the node that makes a value."""
    return next(node for node in model.graph.node if output in node.output)


# A vision encoder on its own, without the decoder.
show(
    "KV001",
    "fixtures/plain/vlm_dual/encoder.onnx --prefix VLLM -o new.onnx",
    fix=("fixtures/plain/vlm_dual --prefix VLLM -d renamed",),
)


@show_decoder("KV101", "model.onnx --prefix VLLM")
def change_kv101(model: ModelProto) -> None:
    """The input `past_key.0` is removed."""
    del model.graph.input[2]  # past_key.0


@show_decoder("KV102", "model.onnx --prefix VLLM")
def change_kv102(model: ModelProto) -> None:
    """The output `past_key.0_RetainedState` is removed."""
    del model.graph.output[1]  # past_key.0_RetainedState


@show_decoder("KV103", "model.onnx --prefix VLLM")
def change_kv103(model: ModelProto) -> None:
    """The input is FLOAT, the output is FLOAT16."""
    model.graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


@show_decoder("KV104", "model.onnx --prefix VLLM")
def change_kv104(model: ModelProto) -> None:
    """The input has 2 heads, the output has 3."""
    model.graph.output[1].type.tensor_type.shape.dim[1].dim_value = 3


@show_decoder("KV105", "model.onnx --prefix VLLM")
def change_kv105(model: ModelProto) -> None:
    """The node writes its result under another name."""
    node = find_node(model, "past_key.0_RetainedState")
    node.output[0] = "lost"


@show_decoder("KV106", "model.onnx --prefix VLLM")
def change_kv106(model: ModelProto) -> None:
    """The input `past_key.0` is declared twice."""
    model.graph.input.append(model.graph.input[2])  # past_key.0


@show_decoder("KV107", "model.onnx --prefix VLLM")
def change_kv107(model: ModelProto) -> None:
    """The node of layer 0 reads the buffer of layer 1."""
    node = find_node(model, "past_key.0_RetainedState")
    node.input[0] = "past_key.1"


@show_decoder("KV108", "model.onnx --prefix VLLM")
def change_kv108(model: ModelProto) -> None:
    """Layer 1 has a key but no value."""
    del model.graph.input[5], model.graph.output[4]  # past_value.1


@show("KV109", "model.onnx --prefix VLLM")
def make_kv109() -> None:
    """Layer 1 of three has no cache."""
    onnx.save(build_cache_model(["full", "none", "full"]), "model.onnx")


@show_decoder("KV110", "verify model.onnx")
def change_kv110(model: ModelProto) -> None:
    """The new key is computed from the value."""
    node = find_node(model, "past_key.0_RetainedState")
    node.input[0] = "past_value.0"


@show("KV111", "model.onnx --prefix VLLM")
def make_kv111() -> None:
    """The names of layer 1 match no rule."""
    text = Path("fixtures/text/decoder.onnxtxt").read_text()
    text = text.replace("past_key.1", "state.a")
    text = text.replace("past_value.1", "state.b")
    onnx.save(onnx.parser.parse_model(text), "model.onnx")


# Names as QEfficient's subfunctions leave them.
show(
    "KV112",
    "fixtures/plain/internal_suffix.onnx --prefix VLLM -o new.onnx",
    fix=("fixtures/plain/internal_suffix.onnx --prefix VLLM --normalize -o new.onnx --force",),
)


@show_decoder("KV113", "verify model.onnx")
def change_kv113(model: ModelProto) -> None:
    """A custom operator without a body updates the buffer."""
    node = find_node(model, "past_key.0_RetainedState")
    node.op_type, node.domain = "Mystery", "local"
    model.opset_import.add(domain="local", version=1)


@show_decoder("KV114", "verify model.onnx")
def change_kv114(model: ModelProto) -> None:
    """The output is an Identity of the input."""
    node = find_node(model, "past_key.0_RetainedState")
    node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output))


@show_decoder("KV115", "verify model.onnx")
def change_kv115(model: ModelProto) -> None:
    """A node reads a value that does not exist."""
    model.graph.node[-1].input[0] = "nowhere"


# A model without the token.
show(
    "KV116",
    "verify fixtures/plain/decoder.onnx --prefix VLLM",
    fix=(
        "fixtures/plain/decoder.onnx --prefix VLLM -o new.onnx",
        "verify new.onnx --prefix VLLM",
    ),
)


@show("KV120", "verify model.onnx --target vllm-qaic")
def make_kv120() -> None:
    """A cache that grows, as Optimum exports it, at a consumer that retains buffers in place."""
    onnx.save(build_decoder(), "model.onnx")


@show_decoder("KV121", "verify model.onnx --renamed-from fixtures/plain/decoder.onnx")
def change_kv121(model: ModelProto) -> None:
    """A weight changed."""
    model.graph.initializer[1].float_data[0] = 0.25  # key_scale


@show_decoder("KV123", "verify model.onnx")
def change_kv123(model: ModelProto) -> None:
    """A node has an operator that onnx does not know."""
    model.graph.node[-1].op_type = "NoSuchOperator"


@show("KV124", "verify model.onnx")
def make_kv124() -> None:
    """A local function is defined twice."""
    model = onnx.load("fixtures/plain/functions.onnx")
    model.functions.append(model.functions[0])
    onnx.save(model, "model.onnx")


@show("KV125", "model.onnx --prefix VLLM")
def make_kv125() -> None:
    """A model of tables."""
    text = """
        <ir_version: 8, opset_import: ["": 17]>
        tables (float[1, 4] past_keys_0, float[1, 4] past_values_0)
        => (float[1, 4] present_keys_0, float[1, 4] present_values_0)
        { present_keys_0 = Neg(past_keys_0)  present_values_0 = Neg(past_values_0) }
    """
    onnx.save(onnx.parser.parse_model(text), "model.onnx")


@show_decoder("KV201", "model.onnx --prefix VLLM", fix=("model.onnx --prefix KV",))
def change_kv201(model: ModelProto) -> None:
    """A node already produces `past_key.0_VLLM`."""
    model.graph.node[0].output[0] = model.graph.node[0].name = "past_key.0_VLLM"


# The model has the token VLLM; vllm-qaic requires vllmKvCache.
show(
    "KV202",
    "fixtures/VLLM/decoder.onnx --target vllm-qaic -o new.onnx",
    fix=("fixtures/VLLM/decoder.onnx --target vllm-qaic --replace -o new.onnx",),
)


# The token is in lower case.
show(
    "KV204",
    "fixtures/plain/decoder.onnx --prefix vllmkvcache -o new.onnx",
    fix=("fixtures/plain/decoder.onnx --target vllm-qaic -o served.onnx",),
)


@show("KV205", "decoder.onnx --prefix VLLM -o new.onnx", fix=("new.onnx --strip",))
def make_kv205() -> None:
    """The names are those of transformers' own exporter."""
    names = (
        "input.past_key_values.layers.{layer}.{part}",
        "output.past_key_values.layers.{layer}.{part}",
    )
    onnx.save(build_model(list_caches(names, parts=("keys", "values"))), "decoder.onnx")


@show("KV301", "windows --prefix VLLM")
def make_kv301() -> None:
    """Two windows have layers 1 and 2."""
    write_windows(Path("windows"), 3)
    onnx.save(build_window(1, 3), "windows/layer_1_2/Tiny_layer_tmp_1_3.onnx")


@show("KV302", "windows --prefix VLLM")
def make_kv302() -> None:
    """The window of layer 1 is missing."""
    shutil.copytree("fixtures/plain/windows", "windows")
    shutil.rmtree("windows/layer_1_2")


@show(
    "KV303",
    "verify windows",
    fix=(
        "windows --prefix VLLM",
        "verify windows",
    ),
)
def make_kv303() -> None:
    """One window of three has a token, as after a copy of a single file."""
    shutil.copytree("fixtures/plain/windows", "windows")
    window = "windows/layer_1_2/Tiny_layer_tmp_1_2.onnx"
    shutil.copy(f"fixtures/VLLM/{window}", window)


@show("KV304", "windows --prefix VLLM")
def make_kv304() -> None:
    """The file of layer 2 has the name of layer 3."""
    shutil.copytree("fixtures/plain/windows", "windows")
    window = Path("windows/layer_2_3/Tiny_layer_tmp_2_3.onnx")
    window.rename(window.with_name("Tiny_layer_tmp_3_4.onnx"))


@show("KV305", "windows --prefix VLLM")
def make_kv305() -> None:
    """One window expects 16 hidden values; the window before it returns 8."""
    shutil.copytree("fixtures/plain/windows", "windows")
    path = "windows/layer_1_2/Tiny_layer_tmp_1_2.onnx"
    model = onnx.load(path, load_external_data=False)
    hidden = model.graph.input[0]  # inputs_embeds
    hidden.type.tensor_type.shape.dim[2].dim_value = 16
    onnx.save(model, path)


@show("KV306", "windows --prefix VLLM")
def make_kv306() -> None:
    """One window is of another version of the exporter."""
    shutil.copytree("fixtures/plain/windows", "windows")
    path = "windows/layer_1_2/Tiny_layer_tmp_1_2.onnx"
    model = onnx.load(path, load_external_data=False)
    model.producer_version = "2.0"
    onnx.save(model, path)


@show("KV307", "windows --prefix VLLM")
def make_kv307() -> None:
    """The merged file has 2 layers; its name and the windows say 3."""
    shutil.copytree("fixtures/plain/windows", "windows")
    models = sorted(Path("windows").glob("*/*.onnx"))
    Path("windows/merged_0-3.onnx").write_bytes(build_merged(models[:2]))


@show_decoder("KV308", "model.onnx --prefix VLLM")
def change_kv308(model: ModelProto) -> None:
    """A decoder whose layer 1 only passes on what an encoder wrote."""
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_key.1", "past_value.1")):
            value.type.tensor_type.shape.dim[2].dim_value = 6404
    for node in model.graph.node:
        if node.output[0].startswith(("past_key.1", "past_value.1")):
            name = node.input[:1]
            node.CopyFrom(onnx.helper.make_node("Identity", name, node.output))


@show("KV401", "cache --prefix VLLM --seed-cache", fix=("cache --prefix VLLM -d renamed",))
def make_kv401() -> None:
    """An export directory that was renamed."""
    write_export(Path("cache")).rename("cache/Tiny-0123456789abcdef")


@show(
    "KV402",
    "cache --prefix VLLM",
    fix=("cache/Tiny-8613cbd67ec84ff4 --prefix VLLM --seed-cache",),
)
def make_kv402() -> None:
    """A rename in QEfficient's cache."""
    write_export(Path("cache"))


@show("KV403", "cache --prefix VLLM --seed-cache")
def make_kv403() -> None:
    """The directory of the renamed export exists, and holds another file."""
    write_export(Path("cache"))
    target = Path("cache") / write_export(Path("other"), token="VLLM").name
    target.mkdir()
    (target / "notes.txt").write_text("mine")


@show("KV404", "fixtures/plain/decoder.onnx --prefix VLLM -o new.onnx --sidecar custom_io.yaml")
def make_kv404() -> None:
    """The file names a layer that the model does not have."""
    Path("custom_io.yaml").write_text("""
    - IOName: past_key.0
      Precision: mxint8
    - IOName: past_key.0_RetainedState
      Precision: mxint8
    - IOName: past_key.7
      Precision: mxint8
    """)


@show("KV405", "fixtures/plain/decoder.onnx --prefix VLLM -o new.onnx --sidecar custom_io.yaml")
def make_kv405() -> None:
    """The file names an input without its output."""
    Path("custom_io.yaml").write_text("""
    - IOName: past_key.0
      Precision: mxint8
    """)


@show(
    "KV406",
    "export/model.onnx --prefix VLLM --sidecars off",
    "verify export/model.onnx",
    fix=(
        "export/model.onnx --prefix VLLM",
        "verify export/model.onnx",
    ),
)
def make_kv406() -> None:
    """A rename that leaves `genai_config.json` as it is."""
    genai_folders.build_folder(Path("export"))


@show(
    "KV407",
    "cache --prefix VLLM --seed-cache",
    fix=("cache/Tiny-8613cbd67ec84ff4 --prefix VLLM --seed-cache",),
)
def make_kv407() -> None:
    """One of two exports is a LoRA export, for which QEfficient has no token."""
    write_export(Path("cache"))
    write_export(Path("cache"), "decoder.onnx", owner="QEffAutoPeftModelForCausalLM")


@show("KV501", "export --prefix VLLM")
def make_kv501() -> None:
    """The weights are one directory up."""
    shutil.copytree("fixtures/plain/external", "export")
    model = onnx.load("export/decoder.onnx", load_external_data=False)
    for weight in model.graph.initializer:
        if weight.external_data:
            weight.external_data[0].value = "../decoder.onnx.data"
    onnx.save(model, "export/decoder.onnx")


@show("KV502", "model.onnx --prefix VLLM")
def make_kv502() -> None:
    """Only the model was copied, not its weights."""
    shutil.copy("fixtures/plain/external/decoder.onnx", "model.onnx")


@show("KV503", "export --prefix VLLM")
def make_kv503() -> None:
    """The weights were cut off."""
    shutil.copytree("fixtures/plain/external", "export")
    os.truncate("export/decoder.onnx.data", 100)


# `new.onnx` is the result of another rename.
show(
    "KV504",
    "fixtures/plain/decoder.onnx --prefix VLLM -o new.onnx",
    "fixtures/plain/mla.onnx --prefix VLLM -o new.onnx",
    fix=("fixtures/plain/mla.onnx --prefix VLLM -o new.onnx --force",),
)


# A model without the token.
show(
    "KV601",
    "verify fixtures/plain/decoder.onnx --target vllm-qaic",
    fix=(
        "fixtures/plain/decoder.onnx --target vllm-qaic -o new.onnx",
        "verify new.onnx --target vllm-qaic",
    ),
)


@show(
    "KV602",
    "model.onnx --target vllm-qaic --full-transfer -o new.onnx",
    fix=("model.onnx --target vllm-qaic --full-transfer --normalize -o new.onnx",),
)
def make_kv602() -> None:
    """A hybrid model with names as QEfficient's subfunctions leave them."""
    model = onnx.load("fixtures/plain/serving/hybrid.onnx")
    for node in model.graph.node:
        node.output[:] = [name.replace("_Ret", "_InternalRet") for name in node.output]
    for value in model.graph.output:
        value.name = value.name.replace("_Ret", "_InternalRet")
    onnx.save(model, "model.onnx")


@show(
    "KV603",
    "model.onnx --prefix vllmKvCache",
    "verify model.onnx --target vllm-qaic",
)
def make_kv603() -> None:
    """The names of transformers have no number after the first dot, where vllm-qaic reads it."""
    onnx.save(build_static_decoder(), "model.onnx")


@show_decoder("KV604", "model.onnx --target vllm-qaic")
def change_kv604(model: ModelProto) -> None:
    """A model without logits."""
    del model.graph.output[0]  # logits


# A linear layer, whose state has no context.
show(
    "KV605",
    "fixtures/plain/hybrid.onnx --target vllm-qaic -o new.onnx",
    fix=("fixtures/plain/hybrid.onnx --target vllm-qaic --full-transfer -o new.onnx",),
)


# A layer with chunks of the context beside one with all of it.
show("KV606", "fixtures/plain/chunked.onnx --target vllm-qaic -o new.onnx")


# An MLA model.
show("KV607", "fixtures/plain/mla.onnx --target vllm-qaic -o new.onnx")


@show_decoder("KV608", "model.onnx --target vllm-qaic")
def change_kv608(model: ModelProto) -> None:
    """An output that is not a KV buffer has the token."""
    name = "embeds.0_vllmKvCache_RetainedState"
    model.graph.node.add(op_type="Identity", input=["logits"], output=[name])
    model.graph.output.add(name=name).type.CopyFrom(model.graph.output[0].type)


@show("KV609", "verify model.onnx --target vllm-qaic --rules rules.toml")
def make_kv609() -> None:
    """Keys sort before values among the inputs, and after them among the outputs."""
    caches = [
        Cache(f"{into}.0_vllmKvCache", f"{out}.0_vllmKvCache_RetainedState", (1, 2, 8, 4))
        for into, out in (("a", "y"), ("b", "x"))
    ]
    caches = [cache._replace(update="inplace") for cache in caches]
    onnx.save(build_model(caches), "model.onnx")
    with contextlib.redirect_stdout(io.StringIO()) as rules:
        main(["pairs", "model.onnx", "--as", "rules"])
    Path("rules.toml").write_text(rules.getvalue())


@show("KV610", "verify model.onnx --target vllm-qaic")
def make_kv610() -> None:
    """A cache in BFLOAT16."""
    model = build_cache_model(["full"], tokens=TOKENS)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    onnx.save(model, "model.onnx")


@show("KV611", "compare prefill.onnx decode.onnx")
def make_kv611() -> None:
    """Decode lacks layer 1."""
    prefill = build_cache_model(["full", "full"], tokens=TOKENS)
    onnx.save(prefill, "prefill.onnx")
    decode = build_cache_model(["full"], tokens=TOKENS)
    onnx.save(decode, "decode.onnx")


@show("KV612", "compare prefill.onnx decode.onnx")
def make_kv612() -> None:
    """Prefill has FLOAT16, decode has INT8."""
    model = build_cache_model(["full"] * 2, tokens=TOKENS)
    onnx.save(model, "prefill.onnx")
    for value in (model.graph.input[1], model.graph.output[1]):
        value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    onnx.save(model, "decode.onnx")


@show("KV613", "compare prefill.onnx decode.onnx")
def make_kv613() -> None:
    """Prefill has 8 heads, decode has 4."""
    model = build_cache_model(["full"] * 2, tokens=TOKENS)
    onnx.save(model, "prefill.onnx")
    for value in (model.graph.input[1], model.graph.output[1]):
        value.type.tensor_type.shape.dim[1].dim_value = 4
    onnx.save(model, "decode.onnx")


# Prefill keeps a window of 8 tokens in layer 1, decode keeps the whole context.
show(
    "KV614",
    "fixtures/plain/serving/window.onnx --target vllm-qaic -o prefill.onnx",
    "fixtures/plain/serving/window_whole.onnx --target vllm-qaic -o decode.onnx",
    "compare prefill.onnx decode.onnx --dim sliding_window=8 --dim ctx_len=32",
)


@show("KV615", "compare prefill.onnx decode.onnx")
def make_kv615() -> None:
    """Decode has its axes of heads and values exchanged."""
    model = build_cache_model(["full"] * 2, tokens=TOKENS)
    onnx.save(model, "prefill.onnx")
    for value in (model.graph.input[1], model.graph.output[1]):
        dims = value.type.tensor_type.shape.dim
        dims[1].dim_value, dims[3].dim_value = 64, 8
    onnx.save(model, "decode.onnx")


# Prefill has the token of vllm-qaic, decode has a different one.
show(
    "KV616",
    "fixtures/plain/decoder.onnx --target vllm-qaic -o model.onnx",
    "compare model.onnx fixtures/VLLM/decoder.onnx",
    fix=(
        "fixtures/VLLM/decoder.onnx --target vllm-qaic --replace -o decode.onnx",
        "compare model.onnx decode.onnx",
    ),
)


@show(
    "KV617",
    "prefill.onnx --rules rules.toml --prefix vllmKvCache",
    "decode.onnx --rules rules.toml --prefix vllmKvCache",
    "compare prefill.onnx decode.onnx --rules rules.toml",
)
def make_kv617() -> None:
    """Decode calls its keys `z_key` and its values `a_value`, which sort the other way round."""
    text = Path("fixtures/text/decoder.onnxtxt").read_text()
    onnx.save(onnx.parser.parse_model(text), "prefill.onnx")
    text = text.replace("past_key", "z_key").replace("past_value", "a_value")
    onnx.save(onnx.parser.parse_model(text), "decode.onnx")
    Path("rules.toml").write_text(r"""
    input = '{part}\.{layer}{token}'
    output = '{input}_RetainedState'
    [[kv]]
    kind = "attention"
    roles = { key = "past_key", value = "past_value" }
    [[kv]]
    kind = "attention"
    name = "other"
    roles = { key = "z_key", value = "a_value" }
    """)


@show("KV618", "compare prefill.onnx decode.onnx --dim sliding_window=8 --dim ctx_len=32")
def make_kv618() -> None:
    """Prefill keeps the whole context in layer 0, decode keeps a window."""
    prefill = build_cache_model(["full", "full"], tokens=TOKENS)
    onnx.save(prefill, "prefill.onnx")
    decode = build_cache_model(["window", "full"], tokens=TOKENS)
    onnx.save(decode, "decode.onnx")


@show("KV624", "model.onnx --prefix vllmKvCache", "compare model.onnx model.onnx")
def make_kv624() -> None:
    """An Optimum export, renamed for vllm-qaic."""
    onnx.save(build_decoder(), "model.onnx")


@show(
    "KV630",
    "model.onnx --target vllm-qaic -o renamed.onnx",
    fix=("model.onnx --prefix vllmKvCache -o renamed.onnx",),
)
def make_kv630() -> None:
    """A static cache of transformers, of which an input counts the positions that are written."""
    names = [f"{side}.past_key_values.layers.{{layer}}.{{part}}" for side in ("input", "output")]
    shape = ("batch_size", 2, 16, 4)
    int64 = onnx.TensorProto.INT64
    caches = [
        *list_caches(names, parts=["cumulative_length"], update="inplace", shape=(), dtype=int64),
        *list_caches(names, parts=["keys", "values"], update="inplace", shape=shape),
    ]
    onnx.save(build_model(caches), "model.onnx")


if __name__ == "__main__":
    for code in sys.argv[1:]:
        print(*(text for text, _ in run_example(code)), sep="")
