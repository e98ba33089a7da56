from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from conftest import Run
from models import KEY, branch, decoder, graph, info, node, saved, tensor, written
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


def prove(path: Path, source: Path) -> tuple[RenameProof, list[str]]:
    """The proof, and the codes and places of its findings."""
    proof, findings = prove_renamed(path, source, QEFF)
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
    assert (proof.equal, proof.token, findings) == (True, "VLLM", [])
    assert proof.names[KEY] == f"{KEY}_VLLM"
    back, findings = prove(source, result)
    assert (back.equal, back.token, findings) == (True, "", [])


def test_one_token_in_the_place_of_another_is_proved(tmp_path: Path):
    source, first = rename_copy(decoder(), tmp_path)
    second = tmp_path / "second.onnx"
    rename(source, "other", output=second)
    proof, findings = prove(second, first)
    assert (proof.equal, findings) == (True, [])
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
        assert not proof.equal
        assert any(finding.startswith("KV121") for finding in findings)


def rich_model() -> ModelProto:
    function = onnx.helper.make_function(
        "local", KEY, [KEY], ["b"], [node("Add", [KEY, KEY], ["b"])], []
    )
    twin = onnx.helper.make_function("local", "Twin", ["a"], ["b"], [], [])
    model = decoder(branch(graph(node("Identity", [KEY], ["copy"]))), functions=(function, twin))
    model.graph.initializer.extend([tensor("w", 1.0, 2.0), tensor("v", 3.0), tensor("large")])
    model.graph.initializer.append(tensor("medium"))
    model.graph.initializer[2].raw_data = bytes(200_000)
    model.graph.initializer[3].raw_data = bytes(3_000)
    model.graph.value_info.extend([info(KEY), info("copy")])
    model.graph.doc_string = "kept"
    model.metadata_props.add(key="author", value="nobody")
    return model


FAULTS: dict[str, tuple[Callable[[ModelProto], object], str]] = {
    "a function's parameter that was not renamed": (
        lambda m: m.functions[0].input.__setitem__(0, KEY),
        "functions[0].input[0] is 'past_key.0', but 'past_key.0_VLLM' in SOURCE",
    ),
    "metadata that were dropped": (
        lambda m: m.ClearField("metadata_props"),
        "has functions[0] where SOURCE has metadata_props[0]",
    ),
    "a doc string that was dropped": (
        lambda m: m.graph.ClearField("doc_string"),
        "graph has input[0] where SOURCE has doc_string",
    ),
    "value_info that was dropped": (
        lambda m: m.graph.ClearField("value_info"),
        "graph has nothing more where SOURCE has value_info[0]",
    ),
    "a node that was added": (
        lambda m: m.graph.node.add(),
        "graph has node[4] where SOURCE has name",
    ),
    "an operator of another version": (
        lambda m: setattr(m.opset_import[0], "version", 17),
        "opset_import[0].version is 17, but 18 in SOURCE",
    ),
    "a weight that changed": (
        lambda m: m.graph.initializer[0].float_data.__setitem__(1, 2.5),
        "graph.initializer[0].float_data[1] is 2.5, but 2.0 in SOURCE",
    ),
    "a weight that is shorter": (
        lambda m: m.graph.initializer[0].float_data.pop(),
        "graph.initializer[0].float_data[1] is nothing, but 2.0 in SOURCE",
    ),
    "a large weight that changed": (
        lambda m: setattr(m.graph.initializer[2], "raw_data", bytes(199_999) + b"1"),
        "graph.initializer[2].raw_data has byte 199,999 as 0x31, but 0x00 in SOURCE",
    ),
    "a weight that changed far from its beginning": (
        lambda m: setattr(m.graph.initializer[3], "raw_data", bytes(2_999) + b"1"),
        "graph.initializer[3].raw_data has byte 2,999 as 0x31, but 0x00 in SOURCE",
    ),
    "a name that is no buffer's": (
        lambda m: setattr(m.graph.initializer[1], "name", "v_VLLM"),
        "graph.initializer[1].name is 'v_VLLM', but 'v' in SOURCE",
    ),
    "a tool that signs its work": (
        lambda m: setattr(m, "producer_name", "tool"),
        "has producer_name where SOURCE has graph",
    ),
    "inputs in another order": (
        lambda m: m.graph.input.reverse(),
        "graph.input[0].name is 'flag', but 'x' in SOURCE",
    ),
    "functions in another order": (
        lambda m: m.functions.reverse(),
        "functions[0].name is 'Twin', but 'past_key.0' in SOURCE",
    ),
    "a capture that was missed": (
        lambda m: rename_capture(m, KEY),
        "graph.node[3].attribute[1].g.node[0].input[0] is 'past_key.0', "
        "but 'past_key.0_VLLM' in SOURCE",
    ),
}


@pytest.mark.parametrize(("fault", "finding"), FAULTS.values(), ids=FAULTS.keys())
def test_what_other_tools_lose_is_found(
    fault: Callable[[ModelProto], object], finding: str, tmp_path: Path
):
    source, result = rename_copy(rich_model(), tmp_path)
    model = onnx.load(result)
    fault(model)
    proof, (found,) = prove_renamed(saved(model, result), source, QEFF)
    assert (proof.equal, found.code) == (False, "KV121")
    said = f"{found.subject} {found.message}".strip()
    assert said == finding.replace("SOURCE", f"the renamed {source}")


def rename_capture(model: ModelProto, name: str) -> None:
    """Change the name by which the branch of the If reads a buffer."""
    body = next(item.g for item in model.graph.node[3].attribute if item.name == "then_branch")
    body.node[0].input[0] = name


def test_a_suffix_that_normalize_changes_is_proved(tmp_path: Path) -> None:
    model = rename_outputs(decoder(), "_RetainedState", "_InternalRetainedState")
    source, result = saved(model, tmp_path / "source.onnx"), tmp_path / "result.onnx"
    rename(source, "VLLM", normalize=True, output=result)
    proof, findings = prove(result, source)
    assert (proof.equal, findings) == (True, [])
    assert proof.names[f"{KEY}_InternalRetainedState"] == f"{KEY}_VLLM_RetainedState"


def rename_outputs(model: ModelProto, old: str, new: str) -> ModelProto:
    """Replace a part of the names of outputs."""
    for item in model.graph.node:
        item.output[:] = [name.replace(old, new) for name in item.output]
    for value in model.graph.output:
        value.name = value.name.replace(old, new)
    return model


def test_the_same_content_in_other_bytes_is_a_difference(tmp_path: Path) -> None:
    source, result = rename_copy(decoder(), tmp_path)
    saved(written(onnx.load(result), width=5), result)
    proof, (finding,) = prove_renamed(result, source, QEFF)
    assert (proof.equal, finding.code) == (False, "KV121")
    assert finding.message == f"has other bytes than the renamed {source}"


def with_external_data(folder: Path) -> Path:
    """A model whose one weight lies beside it."""
    folder.mkdir(parents=True)
    (folder / "w.bin").write_bytes(bytes(range(16)))
    model = decoder()
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    model.graph.initializer.append(weight)
    return saved(model, folder / "model.onnx")


def test_external_data_are_not_read_and_the_verdict_says_so(tmp_path: Path, run: Run) -> None:
    source = with_external_data(tmp_path / "source")
    result = tmp_path / "result" / "model.onnx"
    rename(source, "VLLM", output=result)
    (result.parent / "w.bin").write_bytes(bytes(16))
    proof, findings = prove(result, source)
    assert (proof.equal, proof.data_files, findings) == (True, ("w.bin",), [])
    outcome = run("verify", result, "--renamed-from", source)
    assert outcome.code == 0
    said = f"the same bytes as {source} except for 4 names; 1 file of external data not read"
    assert said in outcome.out


def test_sources_of_several_models_are_told_in_one_line(tmp_path: Path, run: Run) -> None:
    for name in ("a", "b"):
        with_external_data(tmp_path / "source" / name)
    assert run(tmp_path / "source", "--prefix", "VLLM", "-q", "-d", tmp_path / "result").code == 0
    command = ("verify", tmp_path / "result", "--renamed-from", tmp_path / "source")
    outcome = run(*command)
    said = "the same bytes as the sources except for"
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[2:] == [
        f"2 models: {said} 8 names; 2 files of external data not read (use sha256sum)"
    ]
    changed = tmp_path / "result" / "a" / "model.onnx"
    model = onnx.load(changed, load_external_data=False)
    model.graph.node[0].op_type = "Mul"
    saved(model, changed)
    outcome = run(*command)
    assert (outcome.code, outcome.err.count("KV121: ")) == (1, 1)
    source = tmp_path / "source" / "a" / "model.onnx"
    fault = f"graph.node[0].op_type is 'Mul', but 'Add' in the renamed {source}"
    assert f"{changed}: error KV121: {fault}\n" in outcome.err
    assert f"1 of 2 models: {said} 4 names; 1 file of" in outcome.out


def test_one_source_is_not_for_several_models(tmp_path: Path, run: Run) -> None:
    model = saved(decoder(), tmp_path / "model.onnx")
    other = saved(decoder(), tmp_path / "other.onnx")
    assert run("verify", model, other, "--renamed-from", model).code == 2


def test_a_source_that_is_no_model_is_an_error(tmp_path: Path):
    model = saved(decoder(), tmp_path / "model.onnx")
    with pytest.raises(KvRenameError, match="no such file"):
        prove(model, tmp_path / "missing.onnx")


def test_the_library_offers_the_proof(tmp_path: Path) -> None:
    source, result = rename_copy(decoder(), tmp_path)
    verified = verify(result, renamed_from=source)
    assert verified.rename_proof is not None
    assert verified.rename_proof.equal


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
        proof, findings = prove(twins[0], plain)
        assert proof.equal == (name not in VARYING), findings
        proved.add(name)
    assert len(proved) > 10
