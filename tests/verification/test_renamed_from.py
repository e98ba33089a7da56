from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from conftest import Run
from models import KEY, VALUE, branch, decoder, graph, info, node, saved, tensor, written
from onnx import ModelProto, TensorProto
from real_exports import EXPORTS, VARYING
from test_fidelity import MODELS
from tiers import thin

from onnxkvrename import load_rules, rename, verify
from onnxkvrename.errors import KvRenameError
from onnxkvrename.model.file import join_pieces, read_model_signature, splice_payloads
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.kv_model import scan_model
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.verification.renamed_from import RenameProof, prove_renamed

QEFF = load_rules()


def prove(path: Path, source: Path, *, compare_data: bool = False) -> tuple[RenameProof, list[str]]:
    """The proof, and the codes and places of its findings."""
    proof, findings = prove_renamed(path, source, QEFF, compare_data=compare_data)
    return proof, [f"{finding.code} {finding.name}" for finding in findings]


def rename_copy(model: ModelProto, folder: Path, token: str = "VLLM") -> tuple[Path, Path]:
    """A model, and what a rename of it gives."""
    source, result = saved(model, folder / "source.onnx"), folder / "result.onnx"
    rename(source, token, output=result)
    return source, result


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_rename_is_proved_to_the_byte_and_so_is_the_way_back(
    make: Callable[[], ModelProto], tmp_path: Path
):
    source, result = rename_copy(make(), tmp_path)
    proof, findings = prove(result, source)
    assert (proof.equal, proof.token, findings) == ("bytes", "VLLM", [])
    assert proof.names[KEY] == f"{KEY}_VLLM"
    back, findings = prove(source, result)
    assert (back.equal, back.token, findings) == ("bytes", "", [])


def test_one_token_in_the_place_of_another_is_proved(tmp_path: Path):
    source, first = rename_copy(decoder(), tmp_path)
    second = tmp_path / "second.onnx"
    rename(source, "other", output=second)
    proof, findings = prove(second, first)
    assert (proof.equal, findings) == ("bytes", [])
    assert proof.names[f"{KEY}_VLLM"] == f"{KEY}_other"


@pytest.mark.parametrize("make", thin(MODELS.values(), 6), ids=MODELS.keys())
def test_each_place_that_a_tool_forgets_is_found(make: Callable[[], ModelProto], tmp_path: Path):
    raw = make().SerializeToString()
    source = saved(raw, tmp_path / "source.onnx")
    reader = ByteSource.from_bytes(raw)
    scanned = scan_model(
        reader, read_model_signature(reader), source, QEFF, TokenChange("VLLM"), data_beside=None
    )
    edits = scanned.occurrences.build_edits(scanned.model.plan.name_map, scanned.symbols)
    assert len(edits) > 4
    for forgotten in range(len(edits)):
        others = [edit for index, edit in enumerate(edits) if index != forgotten]
        result = join_pieces(reader, splice_payloads(reader, others))
        proof, findings = prove(saved(result, tmp_path / "result.onnx"), source)
        assert proof.equal == "different"
        assert any(finding.startswith("KV121") for finding in findings)


def rich_model() -> ModelProto:
    function = onnx.helper.make_function(
        "local", KEY, [KEY], ["b"], [node("Add", [KEY, KEY], ["b"])], []
    )
    twin = onnx.helper.make_function("local", "Twin", ["a"], ["b"], [], [])
    model = decoder(branch(graph(node("Identity", [KEY], ["copy"]))), functions=(function, twin))
    model.graph.initializer.extend([tensor("w", 1.0, 2.0), tensor("v", 3.0)])
    model.graph.value_info.extend([info(KEY), info("copy")])
    model.graph.doc_string = "kept"
    model.metadata_props.add(key="author", value="nobody")
    return model


FAULTS: dict[str, tuple[Callable[[ModelProto], object], str]] = {
    "a function's parameter that was not renamed": (
        lambda m: m.functions[0].input.__setitem__(0, KEY),
        "KV121 functions.input",
    ),
    "metadata that were dropped": (
        lambda m: m.ClearField("metadata_props"),
        "KV121 metadata_props",
    ),
    "a doc string that was dropped": (
        lambda m: m.graph.ClearField("doc_string"),
        "KV121 graph.doc_string",
    ),
    "value_info that was dropped": (
        lambda m: m.graph.ClearField("value_info"),
        "KV121 graph.value_info",
    ),
    "a weight that changed": (
        lambda m: m.graph.initializer[0].float_data.__setitem__(1, 2.5),
        "KV121 graph.initializer.float_data",
    ),
    "a name that is no buffer's": (
        lambda m: setattr(m.graph.initializer[1], "name", "v_VLLM"),
        "KV121 graph.initializer",
    ),
    "a tool that signs its work": (
        lambda m: setattr(m, "producer_name", "tool"),
        "KV121 producer_name",
    ),
    "inputs in another order": (lambda m: m.graph.input.reverse(), "KV121 graph.input.name"),
}


@pytest.mark.parametrize(("fault", "finding"), FAULTS.values(), ids=FAULTS.keys())
def test_what_other_tools_lose_is_found(
    fault: Callable[[ModelProto], object], finding: str, tmp_path: Path
):
    source, result = rename_copy(rich_model(), tmp_path)
    model = onnx.load(result)
    fault(model)
    proof, findings = prove(saved(model, result), source)
    assert (proof.equal, proof.reordered, findings) == ("different", (), [finding])


def test_plain_names_in_all_local_functions_are_proved_too(tmp_path: Path):
    """So do tools, and releases of this one, that leave the names in functions."""
    made = rich_model()
    made.functions[1].input[0] = f"{VALUE}_InternalRetainedState"
    source, result = rename_copy(made, tmp_path)
    plain, model = onnx.load(source), onnx.load(result)
    proof, _ = prove(result, source)
    assert proof.names[f"{VALUE}_InternalRetainedState"] == model.functions[1].input[0]
    model.functions[0].CopyFrom(plain.functions[0])
    half, findings = prove(saved(model, result), source)
    assert (half.equal, findings) == ("different", ["KV121 functions.input"])
    model.functions[1].CopyFrom(plain.functions[1])
    for given, other, token in ((result, source, "VLLM"), (source, result, "")):
        proof, findings = prove(saved(model, result) if given == result else given, other)
        assert (proof.equal, proof.token, findings) == ("bytes", token, [])


def test_another_order_of_what_is_found_by_name_is_told_and_no_difference(tmp_path: Path, run: Run):
    source, result = rename_copy(rich_model(), tmp_path)
    model = onnx.load(result)
    model.functions.reverse()
    model.graph.initializer.reverse()
    proof, findings = prove(saved(model, result), source)
    assert (proof.equal, findings) == ("content", [])
    assert set(proof.reordered) == {"functions", "graph.initializer"}

    plain = decoder()
    plain.graph.initializer.extend([tensor("w", 1.0), tensor("v", 3.0)])
    (tmp_path / "plain").mkdir()
    source, result = rename_copy(plain, tmp_path / "plain")
    model = onnx.load(result)
    model.graph.initializer.reverse()
    outcome = run("verify", saved(model, result), "--renamed-from", source)
    assert outcome.code == 0
    said = f"the same content as {source} except for 4 names, graph.initializer in another order"
    assert said in outcome.out


def test_another_order_of_nodes_is_a_difference(tmp_path: Path):
    extra = node("Neg", ["x"], ["a"]), node("Abs", ["x"], ["b"])
    source, result = rename_copy(decoder(*extra), tmp_path)
    model = onnx.load(result)
    nodes = [*model.graph.node]
    at = [item.op_type for item in nodes].index("Neg")
    nodes[at], nodes[at + 1] = nodes[at + 1], nodes[at]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    proof, findings = prove(saved(model, result), source)
    assert (proof.equal, findings[0][:10]) == ("different", "KV121 grap")


def test_behind_another_order_other_content_is_found(tmp_path: Path):
    source, result = rename_copy(rich_model(), tmp_path)
    model = onnx.load(result)
    model.functions.reverse()
    model.functions[1].doc_string = "changed"
    proof, findings = prove(saved(model, result), source)
    assert (proof.equal, findings) == ("different", ["KV121 functions.doc_string"])


def test_the_same_content_in_other_bytes_is_a_warning(tmp_path: Path):
    source, result = rename_copy(decoder(), tmp_path)
    saved(written(onnx.load(result), width=5), result)
    proof, findings = prove(result, source)
    assert proof.equal == "content"
    assert {finding[:5] for finding in findings} == {"KV122"}


def with_external_data(folder: Path) -> Path:
    """A model whose one weight lies beside it."""
    folder.mkdir()
    (folder / "w.bin").write_bytes(bytes(range(16)))
    model = decoder()
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    model.graph.initializer.append(weight)
    return saved(model, folder / "model.onnx")


def test_external_data_are_compared_when_that_is_asked_for(tmp_path: Path, run: Run):
    source = with_external_data(tmp_path / "source")
    result = tmp_path / "result" / "model.onnx"
    rename(source, "VLLM", output=result)
    digest = hashlib.sha256(bytes(range(16))).hexdigest()
    assert prove(result, source)[0].data_sha256 == {"w.bin": None}
    assert prove(result, source, compare_data=True)[0].data_sha256 == {"w.bin": digest}

    (result.parent / "w.bin").write_bytes(bytes(16))
    assert prove(result, source)[0].equal == "bytes"  # of the model: the data were not read
    proof, findings = prove(result, source, compare_data=True)
    assert (proof.equal, findings) == ("different", ["KV121 w.bin"])

    (source.parent / "w.bin").unlink()
    _, findings = prove(result, source, compare_data=True)
    assert findings == ["KV121 w.bin"]


def test_the_command_says_what_was_compared_and_no_more(tmp_path: Path, run: Run):
    source = with_external_data(tmp_path / "source")
    result = tmp_path / "result" / "model.onnx"
    rename(source, "VLLM", output=result)
    outcome = run("verify", result, "--renamed-from", source)
    assert outcome.code == 0
    assert f"{source} except for 4" in outcome.out
    assert "1 file" in outcome.out
    assert "not read (--compare-data)" in outcome.out
    outcome = run("verify", result, "--renamed-from", source, "--compare-data")
    assert "1 file of" in outcome.out
    assert "the same" in outcome.out

    shutil.copy(source, result)
    model = onnx.load(result, load_external_data=False)
    model.graph.node[0].op_type = "Mul"
    saved(model, result)
    outcome = run("verify", result, "--renamed-from", source)
    assert outcome.code == 1
    assert "KV121: graph.node.op_type graph.node[0] (Add write_key).op_type: 'Mul'" in outcome.err


def test_options_that_need_a_source_say_so(tmp_path: Path, run: Run):
    model = saved(decoder(), tmp_path / "model.onnx")
    outcome = run("verify", model, "--compare-data")
    assert (outcome.code, "--renamed-from" in outcome.err) == (2, True)
    other = saved(decoder(), tmp_path / "other.onnx")
    assert run("verify", model, other, "--renamed-from", model).code == 2


def test_a_source_that_is_no_model_is_an_error(tmp_path: Path):
    model = saved(decoder(), tmp_path / "model.onnx")
    with pytest.raises(KvRenameError, match="no such file"):
        prove(model, tmp_path / "missing.onnx")


def test_the_library_offers_the_proof(tmp_path: Path):
    source, result = rename_copy(decoder(), tmp_path)
    verified = verify(result, renamed_from=source, compare_data=True)
    assert verified.rename_proof is not None
    assert verified.rename_proof.equal == "bytes"
    with pytest.raises(ValueError, match="renamed_from"):
        verify(result, compare_data=True)


@pytest.mark.skipif(not EXPORTS.is_dir(), reason="the real exports are not here")
def test_an_export_with_the_token_is_the_renamed_plain_export():
    """The exporter's own result, file by file: to the byte where it is deterministic."""
    proved = set()
    for plain in sorted(EXPORTS.glob("*/plain-*/**/*.onnx")):
        case = plain.relative_to(EXPORTS).parts[0]
        twins = list(EXPORTS.glob(f"{case}/VLLM-*/**/{plain.name}"))
        if not twins:
            continue
        name = f"{case}/{plain.name}"
        proof, findings = prove(twins[0], plain, compare_data=True)
        assert (proof.equal == "bytes") == (name not in VARYING), findings
        proved.add(name)
    assert len(proved) > 10
    (merged,) = EXPORTS.glob("lw_qwen3moe/plain-*/merged_0-2.onnx")
    (twin,) = EXPORTS.glob("lw_qwen3moe/VLLM-*/merged_0-2.onnx")
    proof, findings = prove(twin, merged)
    assert (proof.equal, proof.reordered, findings) == ("content", ("functions",), [])
