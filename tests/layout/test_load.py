"""From paths to layouts: models, sets, layout files."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import models
import onnx
import pytest
import window_sets
from genai_folders import build_decoder
from models import saved

from onnxkvrename import KvRenameError, ModelError, load_rules
from onnxkvrename.layout.inspect import Inspection
from onnxkvrename.layout.load import LoadedLayout, load_layout
from onnxkvrename.report.documents.inspect_json import DOCUMENT, describe_inspection

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
RULES = load_rules()
REAL = pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")


def gather(*paths: Path, sizes: dict[str, int] | None = None, strict: bool = False) -> LoadedLayout:
    return load_layout(paths, RULES, sizes or {}, strict=strict)


def describe(*paths: Path) -> list[tuple[object, ...]]:
    """Return what a consumer needs to know of each buffer, one sequence at a time."""
    return [
        (b.layer, b.part, b.kind, b.dtype, b.sequence_shape, b.input or b.output)
        for b in gather(*paths).layout.buffers
    ]


def codes(found: LoadedLayout) -> list[str]:
    return [finding.code for report in found.reports for finding in report.findings]


def written(path: Path, found: LoadedLayout) -> Path:
    content = describe_inspection(Inspection((), (found,)), RULES.profile_choice)
    path.write_text(DOCUMENT.render(content, int(found.failed)), "utf-8")
    return path


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Three windows of one model."""
    return window_sets.write_windows(tmp_path / "export", 3)


def merge(export: Path, first: int, end: int, token: str = "") -> Path:
    model = window_sets.build_window(first, end, token)
    return saved(model, export / f"merged_{first}-{end}.onnx")


# One model, one set.


def test_a_model_is_a_layout_with_its_report(decoder: Path) -> None:
    found = gather(decoder)
    assert found.layout.models == (str(decoder),)
    assert len(found.layout.buffers) == 4
    assert [report.status for report in found.reports] == ["unchanged"]
    assert not found.failed


def test_a_model_without_buffers_beside_one_with_them_is_no_part_of_the_layout() -> None:
    directory = FIXTURES / "plain" / "vlm_dual"
    found = gather(directory)
    assert found.layout.models == (str(directory / "decoder.onnx"),)
    assert len(found.reports) == 2
    assert codes(found) == []
    reasons = {kept.name: kept.reason for kept in found.layout.kept}
    assert reasons["vision_embeds_RetainedState"] == "vision"


def test_a_model_whose_buffers_only_another_profile_knows_is_refused(tmp_path: Path) -> None:
    """As one that this profile knows is: the layout would lack its buffers."""
    ours = saved(models.decoder(), tmp_path / "a.onnx")
    other = saved(build_decoder(), tmp_path / "b.onnx")
    for paths in ([ours, other], [tmp_path]):
        with pytest.raises(ModelError, match=f"not the same model .*{ours}: profile") as caught:
            gather(*paths)
        assert caught.value.path == str(other)
        assert "--profile huggingface" in str(caught.value.hint)
    saved(models.decoder(), other)
    with pytest.raises(ModelError, match="is one of 2 models"):
        gather(ours, other)


def test_no_buffer_anywhere_is_found() -> None:
    found = gather(FIXTURES / "plain" / "vlm_dual" / "encoder.onnx")
    assert (codes(found), found.failed, found.layout.buffers) == (["KV001"], True, ())


def test_what_is_wrong_with_a_model_is_found(tmp_path: Path) -> None:
    model = models.decoder()
    model.graph.output.pop()
    found = gather(saved(model, tmp_path / "m.onnx"))
    assert "KV102" in codes(found)
    assert found.failed


def test_strict_makes_warnings_errors() -> None:
    model = FIXTURES / "plain" / "internal_suffix.onnx"
    assert set(codes(gather(model))) == {"KV112"}
    assert not gather(model).failed
    assert gather(model, strict=True).failed
    assert gather(model, strict=True).reports[0].status == "failed"


def test_windows_in_any_order_are_one_layout(export: Path) -> None:
    files = sorted(export.rglob("*.onnx"))
    found = [gather(*order).layout for order in itertools.permutations(files)]
    assert all(layout == found[0] for layout in found)
    assert found[0].layers == (0, 1, 2)
    assert found[0].models == tuple(map(str, files))


def test_windows_that_do_not_fit_are_found(export: Path) -> None:
    shutil.rmtree(export / "layer_1_2")
    assert codes(gather(export)) == ["KV302"]


def test_a_window_alone_is_a_layout_too(export: Path) -> None:
    assert gather(export / "layer_1_2").layout.layers == (1,)


def test_a_merge_beside_its_windows_stands_for_them(export: Path) -> None:
    merged = merge(export, 0, 3)
    assert gather(export).layout.models == (str(merged),)
    assert describe(export) == describe(merged) == describe(*sorted(export.glob("layer*")))


def test_windows_stand_for_an_unfinished_merge(export: Path) -> None:
    merge(export, 1, 3)
    found = gather(export)
    assert len(found.layout.models) == 3
    assert found.layout.layers == (0, 1, 2)


def test_the_last_of_several_merges_stands_for_all(export: Path) -> None:
    merge(export, 1, 3)
    merged = merge(export, 0, 3)
    assert gather(export).layout.models == (str(merged),)


@pytest.mark.parametrize("other", ["decoder.onnx", "hybrid.onnx", "mla.onnx"])
def test_two_unrelated_models_are_refused(other: str, decoder: Path) -> None:
    mine = shutil.copyfile(FIXTURES / "plain" / other, decoder.parent / "other.onnx")
    with pytest.raises(ModelError, match="is one of 2 models") as error:
        gather(decoder, mine)
    assert error.value.path in (str(decoder), str(mine))


def test_of_several_models_the_one_with_whole_buffers_is_named(decoder: Path) -> None:
    """That of an encoder only come out, like those of a decoder's first step."""
    encoder = onnx.load(decoder)
    inputs = [value for value in encoder.graph.input if not value.name.startswith("past_")]
    del encoder.graph.input[:]
    encoder.graph.input.extend(inputs)
    first = saved(encoder, decoder.with_name("an_encoder.onnx"))
    with pytest.raises(ModelError) as error:
        gather(decoder.parent)
    assert f"{decoder}: is one of 2 models, as is {first};" in str(error.value)


def test_two_merged_exports_are_not_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        merge(tmp_path / name, 0, 2)
    with pytest.raises(ModelError, match="is one of 2 models"):
        gather(tmp_path)


def test_a_merge_above_the_windows_of_two_models_stands_for_neither(export: Path) -> None:
    for path in sorted(export.rglob("*.onnx")):
        shutil.copyfile(path, path.with_name(path.name.replace("Tiny", "Other")))
    merge(export, 0, 3)
    with pytest.raises(ModelError, match="is one of 7 models"):
        gather(export)


def test_a_symbol_of_the_batch_changes_nothing_for_a_consumer_and_a_token_does(
    tmp_path: Path, decoder: Path
) -> None:
    model = decoder.read_bytes()
    assert b"batch_size" in model
    other = saved(model.replace(b"batch_size", b"batch_siez"), tmp_path / "other.onnx")
    assert describe(decoder) == describe(other)
    assert describe(decoder) != describe(FIXTURES / "VLLM" / "decoder.onnx")


@REAL
def test_real_exports_for_one_batch_or_continuous_batching_are_one_to_a_consumer() -> None:
    batch, continuous = (
        describe(*EXPORTS.glob(f"{case}/VLLM-*")) for case in ("llama2l", "llama2l_cb")
    )
    assert batch == continuous
    assert batch != describe(*EXPORTS.glob("llama2l/plain-*"))


@REAL
@pytest.mark.parametrize("kind", ["plain", "VLLM"])
def test_a_real_merge_stands_for_its_windows_and_says_the_same(kind: str) -> None:
    (directory,) = EXPORTS.glob(f"lw_qwen3moe/{kind}-*")
    found = gather(directory)
    assert found.layout.models == (str(directory / "merged_0-2.onnx"),)
    assert describe(directory) == describe(directory / "onnx_layerwise_tmp")


# Sizes.


def test_sizes_are_those_given(decoder: Path) -> None:
    found = gather(decoder, sizes={"ctx_len": 32})
    assert found.layout.sizes == {"ctx_len": 32}


def test_a_size_for_what_no_buffer_has_is_refused(decoder: Path) -> None:
    with pytest.raises(KvRenameError, match="--dim seq_len: "):
        gather(decoder, sizes={"seq_len": 1})


@pytest.mark.parametrize(("given", "close"), [("ctx_lem", "(did you mean ctx_len?)"), ("x", "")])
def test_a_size_for_nearly_a_symbol_is_told_the_symbol(
    given: str, close: str, decoder: Path
) -> None:
    with pytest.raises(KvRenameError) as error:
        gather(decoder, sizes={given: 4})
    said = f"--dim {given}: buffers have no such dimension; they have batch_size, ctx_len {close}"
    assert str(error.value) == said.strip()


# One side of a hand-off.


@pytest.mark.parametrize("name", ["kv.json", "kv", "kv.onnx"])
def test_a_layout_file_stands_for_its_model_whatever_it_is_called(
    name: str, tmp_path: Path
) -> None:
    found = gather(FIXTURES / "VLLM" / "hybrid.onnx", sizes={"ctx_len": 64})
    assert load_layout([written(tmp_path / name, found)], RULES).layout == found.layout


def test_a_layout_file_that_an_editor_saved_with_a_mark_and_blanks_is_read(tmp_path: Path) -> None:
    found = gather(FIXTURES / "VLLM" / "decoder.onnx")
    path = written(tmp_path / "m.json", found)
    path.write_bytes(b"\xef\xbb\xbf\r\n " + path.read_bytes())
    assert load_layout([path], RULES).layout == found.layout


def test_sizes_fill_in_what_a_layout_file_does_not_say(decoder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "m.json", gather(decoder, sizes={"batch_size": 2}))
    found = gather(path, sizes={"ctx_len": 8}).layout
    assert found.sizes == {"ctx_len": 8, "batch_size": 2}


def test_a_size_that_a_layout_file_says_otherwise_is_refused(decoder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "m.json", gather(decoder, sizes={"ctx_len": 64}))
    assert gather(path, sizes={"ctx_len": 64}).layout.sizes == {"ctx_len": 64}
    with pytest.raises(KvRenameError, match=r"ctx_len=64, .* 8"):
        gather(path, sizes={"ctx_len": 8})


def test_what_was_wrong_with_a_model_is_still_wrong_in_its_layout_file(tmp_path: Path) -> None:
    model = models.decoder()
    model.graph.output.pop()
    found = gather(saved(model, tmp_path / "m.onnx"))
    side = load_layout([written(tmp_path / "m.json", found)], RULES)
    assert (codes(side), side.failed) == (codes(found), True)
    assert [report.path for report in side.reports] == [str(tmp_path / "m.json")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[]", "a text file"),
        (b"{\xff", "is not UTF-8 text"),
        (b"{", "is not JSON"),
        (b"{}", "not a layout"),
    ],
)
def test_what_is_neither_a_model_nor_a_layout_file_is_refused(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error:
        load_layout([saved(content, tmp_path / "m.json")], RULES)
    assert str(error.value).startswith(f"{tmp_path / 'm.json'}: ")
    assert reason in str(error.value)


def test_a_side_that_is_not_there_is_said_to_be_missing(decoder: Path) -> None:
    with pytest.raises(ModelError, match=r"no such file .*decoder.onnx"):
        load_layout([decoder.with_name("decodr.onnx")], RULES)
