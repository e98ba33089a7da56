from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import models
import onnx
import pytest
from cache_models import HYBRID, build_cache_model
from models import saved
from onnx import ModelProto, TensorProto
from tiers import full

from onnxkvrename import load_rules
from onnxkvrename.files.read import open_file
from onnxkvrename.layout.inspect import (
    BufferGroup,
    ExternalFile,
    ModelSummary,
    group_buffers,
    inspect_model,
    summarize_model,
)
from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.file import OpenModel
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import ExportInfo
from onnxkvrename.rules.plan import UnchangedName

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
HEAVY = {"onnx", "onnx_graphsurgeon", "numpy", "rich", "google.protobuf"}
QEFF = load_rules()


@pytest.fixture
def inspected(tmp_path: Path):
    """Return a function that inspects a model, or one made of these kinds of layers."""

    def inspect(model: ModelProto | tuple[str, ...], **how: object) -> ModelSummary:
        made = model if isinstance(model, ModelProto) else build_cache_model(model, **how)  # type: ignore[arg-type]
        return inspect_model(saved(made, tmp_path / "m.onnx"), QEFF)

    return inspect


def states(found: ModelSummary) -> dict[str, str]:
    return {f"{item.buffer}.{item.layer}": item.state for item in found.buffers}


def codes(found: ModelSummary) -> list[str]:
    return [finding.code for finding in found.findings]


def test_the_facts_of_a_file_are_told(inspected, tmp_path: Path) -> None:
    found = inspected(("full", "full"))
    assert found.path == str(tmp_path / "m.onnx")
    assert found.size == (tmp_path / "m.onnx").stat().st_size
    assert found.export == ExportInfo(10, "tests", "1", (("", 18),))
    assert found.node_count == 5
    assert (found.layers, found.token_counts, found.name_count) == ((0, 1), (), 8)
    assert (found.kept, found.findings, found.error) == (
        (UnchangedName("logits", "not retained"),),
        (),
        None,
    )


def test_a_buffer_is_told_with_kind_dtype_and_shape(inspected) -> None:
    first, *_ = inspected(("window",)).buffers
    assert first._asdict() == {
        "layer": 0,
        "buffer": "past_key",
        "scope": "",
        "kind": "sliding_window",
        "state": "plain",
        "dtype": "FLOAT16",
        "shape": ("batch_size", 8, "sliding_window", 64),
        "input": "past_key.0",
        "output": "past_key.0_RetainedState",
        "kind_guessed": False,
        "update": BufferUpdate("untraced"),
    }


def test_like_buffers_are_grouped_by_kind_and_layers(inspected) -> None:
    linear = (0, 1, 3, 4)
    assert group_buffers(inspected(HYBRID[:6]).buffers) == (
        BufferGroup("mamba", ("conv_state",), "FLOAT16", ("batch_size", 512, 4), linear),
        BufferGroup("mamba", ("recurrent_state",), "FLOAT16", ("batch_size", 16, 128, 128), linear),
        BufferGroup(
            "full_attention",
            ("past_key", "past_value"),
            "FLOAT16",
            ("batch_size", 8, "ctx_len", 64),
            (2, 5),
        ),
    )


def test_linear_layers_are_told_though_they_are_called_attention(inspected) -> None:
    found = inspected(("full", "qwen"))
    assert [item.kind for item in found.buffers] == ["full_attention"] * 2 + ["mamba"] * 2
    assert {item.buffer for item in found.buffers} == {"past_key", "past_value"}


def test_the_token_is_told_with_the_names_that_carry_it(inspected) -> None:
    found = inspected(("full", "full"), tokens=("VLLM", "VLLM"))
    assert (found.token_counts, found.name_count) == ((("VLLM", 8),), 8)
    assert set(states(found).values()) == {"token"}
    assert codes(found) == []


def test_a_token_on_one_side_only_is_half(inspected) -> None:
    found = inspected(("full",), tokens=("", "VLLM"))
    assert (found.token_counts, found.name_count) == ((("VLLM", 2),), 4)
    assert set(states(found).values()) == {"half"}


def test_two_tokens_are_both_told_and_found_wrong(inspected) -> None:
    found = inspected(("full",), tokens=("A", "B"))
    assert found.token_counts == (("A", 2), ("B", 2))
    assert codes(found) == ["KV202"]
    assert set(states(found).values()) == {"half"}


def test_a_part_that_a_layer_lacks_is_missing_in_its_place(inspected) -> None:
    found = inspected(
        ("full", "mla"),
        without={"past_value.0", "past_value.0_RetainedState", "k_pe.1", "k_pe.1_RetainedState"},
    )
    assert states(found) == {
        "past_key.0": "plain",
        "past_value.0": "missing",
        "compressed_kv.1": "plain",
        "k_pe.1": "missing",
    }
    assert [item.kind for item in found.buffers] == ["full_attention"] * 2 + ["mla_attention"] * 2
    missing = found.buffers[1]
    assert (missing.dtype, missing.shape, missing.input, missing.output) == ("", None, None, None)
    assert [group.buffers for group in group_buffers(found.buffers)] == [
        ("past_key",),
        ("compressed_kv",),
    ]
    assert codes(found) == ["KV108", "KV108"]
    assert found.name_count == 4


@pytest.mark.parametrize(
    ("without", "code"), [("past_key.1_VLLM_RetainedState", "KV102"), ("past_key.1_VLLM", "KV101")]
)
def test_a_buffer_with_an_error_of_its_own_is_broken(inspected, without: str, code: str) -> None:
    found = inspected(("full", "full"), tokens=("VLLM", "VLLM"), without={without})
    assert states(found)["past_key.1"] == "broken"
    assert set(states(found).values()) == {"token", "broken"}
    assert codes(found) == [code]
    assert found.failed


def test_a_warning_breaks_no_buffer(inspected) -> None:
    model = build_cache_model(("full",))
    model.graph.node[1].input[0] = "x"  # so that nothing reads past_key.0
    found = inspected(model)
    assert codes(found) == ["KV107"]
    assert set(states(found).values()) == {"plain"}
    assert not found.failed


def test_of_a_buffer_claimed_twice_the_first_is_broken(inspected) -> None:
    model = build_cache_model(("full",))
    model.graph.output.append(models.info("past_key.0_VLLM_RetainedState"))
    found = inspected(model)
    assert "KV106" in codes(found)
    assert states(found) == {"past_key.0": "broken", "past_value.0": "plain"}


def test_what_stays_is_told_with_the_reason(inspected) -> None:
    model = build_cache_model(("full",))
    model.graph.output.append(models.info("vision_embeds_RetainedState"))
    model.graph.output.append(models.info("indexer_key_cache.0_RetainedState"))
    found = inspected(model)
    assert found.kept[1:] == (
        UnchangedName("vision_embeds_RetainedState", "vision"),
        UnchangedName("indexer_key_cache.0_RetainedState", "unknown"),
    )
    assert codes(found) == ["KV111"]


def test_a_model_without_buffers_is_no_fault_here(inspected) -> None:
    found = inspected(())
    assert (found.buffers, found.layers, found.findings) == ((), (), ())
    assert not found.failed


def test_data_files_are_told_with_their_sizes(external: Path) -> None:
    found = inspect_model(external, QEFF)
    assert found.files == (ExternalFile("decoder.onnx.data", 2560),)
    assert found.external_bytes == 2560


@pytest.mark.parametrize(
    ("location", "code"), [("gone.bin", "KV502"), ("../w.bin", "KV501"), ("short.bin", "KV503")]
)
def test_a_data_file_that_cannot_be_used_has_no_size(
    inspected, tmp_path: Path, location: str, code: str
) -> None:
    (tmp_path / "short.bin").write_bytes(b"1")
    (tmp_path / "w.bin").write_bytes(b"1234")
    weights = [outside("w.bin"), outside(location), outside("w.bin")]
    found = inspected(("full",), weights=weights)
    assert found.files == (ExternalFile("w.bin", 4), ExternalFile(location, None))
    assert (found.external_bytes, codes(found)) == (4, [code])


def outside(location: str) -> TensorProto:
    """A weight of four bytes in a file beside the model."""
    weight = TensorProto(name=f"weight in {location}", dims=[1], data_type=1, data_location=1)
    weight.external_data.add(key="location", value=location)
    return weight


def test_a_hundred_gigabytes_of_data_are_only_stated(inspected, tmp_path: Path) -> None:
    size = 100_000_000_000
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(size)  # a hole: it takes no room
    found = inspected(("full",), weights=[outside("w.bin")])
    assert found.external_bytes == size


def test_weights_in_the_model_are_never_read(tmp_path: Path) -> None:
    size = 1_900_000_000
    path = saved(heavy(size), tmp_path / "m.onnx")
    os.truncate(path, path.stat().st_size + size)
    read = []

    def counted(offset: int, size: int) -> bytes:
        read.append(size)
        return file.read(offset, size)

    with open_file(path) as file:
        source = ByteSource(counted, file.size)
        found, _ = summarize_model(OpenModel(file, source, read_signature(source)), QEFF)
    assert found.node_count == 5
    assert set(states(found).values()) == {"plain"}
    assert sum(read) < 1 << 20


def heavy(size: int) -> bytes:
    """A model up to the last weight, of whose values only the length is there."""
    model = build_cache_model(("full", "full"))
    main = model.graph.SerializeToString()
    weight = models.field(8, "w") + models.varint(9 << 3 | 2) + models.varint(size)
    held = models.varint(5 << 3 | 2) + models.varint(len(weight) + size) + weight
    head = models.field(1, 10) + models.field(8, models.field(2, 18))
    return head + models.varint(7 << 3 | 2) + models.varint(len(main + held) + size) + main + held


def test_what_cannot_be_read_is_an_error_of_its_own(tmp_path: Path, decoder: Path) -> None:
    gone = inspect_model(tmp_path / "gone.onnx", QEFF)
    text = inspect_model(saved(b"no model", tmp_path / "m.onnx"), QEFF)
    assert gone == ModelSummary(str(tmp_path / "gone.onnx"), error=gone.error)
    assert text.error is not None
    assert "text file" in text.error.message
    sound = inspect_model(decoder, QEFF)
    assert text.failed
    assert not sound.failed


def test_a_finding_of_severity_error_is_a_failure(inspected) -> None:
    assert inspected(("full",), without={"past_key.0"}).failed


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.rglob("*.onnx")), ids=lambda path: str(path.relative_to(FIXTURES))
)
def test_every_fixture_is_told_without_errors(path: Path) -> None:
    found = inspect_model(path, QEFF)
    assert not found.failed
    assert bool(found.buffers) == (path.name != "encoder.onnx")
    assert "unknown" not in {item.kind for item in found.buffers}
    model = onnx.load(path, load_external_data=False)
    assert found.node_count == len(model.graph.node)
    assert found.function_names == tuple(made.name for made in model.functions)


@full
@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
def test_every_real_export_is_told_and_only_the_broken_one_is_wrong() -> None:
    wrong = set()
    for path in sorted(EXPORTS.rglob("*.onnx")):
        found = inspect_model(path, QEFF)
        case, variant, *_ = path.relative_to(EXPORTS).parts
        if found.failed:
            wrong.add((case, variant.partition("-")[0]))
        assert {token for token, _ in found.token_counts} <= {variant.partition("-")[0]} - {"plain"}
        assert "unknown" not in {item.kind for item in found.buffers}
    assert wrong == {("llama2l_dynamo_subfn", "VLLM")}


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("llama12l/plain-*/Llama*", ["full_attention"] * 12),
        ("deepseekv3_mla/plain-*/Deepseek*", ["mla_attention"] * 2),
        ("gemma3vlm_dual/plain-*/Gemma3Decoder*", ["sliding_window", "full_attention"]),
    ],
)
def test_the_layers_of_real_exports_are_of_their_kinds(case: str, kinds: list[str]) -> None:
    (path,) = EXPORTS.glob(f"{case}.onnx")
    found = inspect_model(path, QEFF)
    assert [item.kind for item in found.buffers[::2]] == kinds


def test_a_merge_in_progress_has_its_layers_in_scopes(tmp_path: Path) -> None:
    model = build_cache_model(("full", "full"))
    for value in (*model.graph.input, *model.graph.output):
        if "." in value.name:
            value.name = f"layer_{value.name.split('.')[1][0]}/{value.name}"
    found = inspect_model(saved(model, tmp_path / "m.onnx"), QEFF)
    assert [(item.scope, item.layer) for item in found.buffers[::2]] == [
        ("layer_0/", 0),
        ("layer_1/", 1),
    ]


def test_nothing_heavy_is_loaded(decoder: Path) -> None:
    script = (
        "import sys, pathlib; from onnxkvrename import load_rules;"
        "from onnxkvrename.layout.inspect import inspect_models;"
        "from onnxkvrename.report.documents.inspect_json import describe_inspection;"
        "found = inspect_models([pathlib.Path(sys.argv[1])], load_rules());"
        "describe_inspection(found, load_rules().profile_choice);"
        "print(*sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(decoder)], capture_output=True, text=True, check=True
    )
    assert "onnxkvrename.layout.inspect" in process.stdout.split()
    assert not HEAVY & set(process.stdout.split())


def test_a_rename_does_without_all_this(decoder: Path) -> None:
    script = (
        "import sys; from onnxkvrename.cli import main as cli; cli.main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(decoder), "--prefix", "VLLM", "-q"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = process.stderr.split()
    unused = ("layout", "report.inspection", "report.pages")
    assert "onnxkvrename.rules.plan" in loaded
    assert not [
        name for name in loaded if name.startswith(tuple(f"onnxkvrename.{n}" for n in unused))
    ]
