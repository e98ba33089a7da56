from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from hugging_face import save_decoder
from tiers import thin

from onnxkvrename import rename

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
TOKEN = "vllmKvCache"
SIZES = ("--dim", "ctx_len=32", "--dim", "sliding_window=8")
BROKEN = "llama2l_dynamo_subfn"
SAMPLER = "llama2l_sampler"
GROWING = "gemma3text"


@pytest.fixture
def named(tmp_path: Path) -> Callable[[str], Path]:
    """A fixture under the consumer's token."""

    def make(name: str) -> Path:
        path = tmp_path / "named" / name
        rename(FIXTURES / "plain" / name, TOKEN, output=path)
        return path

    return make


def document(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def codes(found: dict[str, Any]) -> list[str]:
    return [one["code"] for one in found["findings"]]


def write_layout(run: Any, path: Path, *arguments: object) -> Path:
    """Write the layout file of a model, as `inspect` prints it."""
    outcome = run("inspect", *arguments, "--format", "json")
    assert outcome.code == 0
    path.write_text(outcome.out, "utf-8")
    return path


def test_a_model_hands_over_to_itself(run, named) -> None:
    model = named("serving/window.onnx")
    outcome = run("compare", model, model, *SIZES)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "hand-off works: 6 buffers of layers 0-2, prompts of up to 32 tokens, if both sides have "
        "the same weights and are compiled with the same precision; based on vllm-qaic's rules\n"
        "LAYERS  PARTS       PREFILL                         DECODE  HAND-OFF\n"
        "0, 2    key, value  FLOAT [2, ctx_len=32, 4]        same    ok\n"
        "1       key, value  FLOAT [2, sliding_window=8, 4]  same    ok\n"
    )


def test_a_window_on_one_side_is_shown_at_once(run, named) -> None:
    full, window = named("serving/window_whole.onnx"), named("serving/window.onnx")
    outcome = run("compare", full, window, *SIZES)
    assert outcome.code == 1
    verdict, _, *rows = outcome.out.splitlines()
    assert "would corrupt" in verdict
    assert "longer than 8" in verdict
    assert [row.split("  ")[-1] for row in rows] == [
        "ok",
        "wrong for prompts longer than 8 tokens (KV614)",
        "shifted for prompts longer than 8 tokens",
    ]
    assert outcome.err.count("error KV614") == outcome.err.count("error KV618") == 1
    assert all(f"{window.name}: error KV6" in line for line in outcome.err.splitlines()[::2])
    assert f"{window.name}: error KV618: " in outcome.err


def test_the_document_has_offsets_of_both_sides(run, named) -> None:
    full, window = named("serving/window_whole.onnx"), named("serving/window.onnx")
    outcome = run("compare", full, window, *SIZES, "--format", "json")
    found = document(outcome.out)
    assert (outcome.code, found["exit_code"], outcome.err) == (1, 1, "")
    assert codes(found) == ["KV614", "KV618"]
    assert found["verdict"]["outcome"] == "corrupts"
    assert found["verdict"]["corrupt"] == [{"first": 9, "last": 32}]
    assert found["verdict"]["first_wrong"] == 9
    assert [one["tokens"] for one in found["transfers"]] == [1, 8, 9, 32]
    nine = next(one for one in found["transfers"] if one["tokens"] == 9)
    assert [slot["offset"] for slot in nine["prefill"]["slots"]] == [288 * at for at in range(6)]
    assert [slot["offset"] for slot in nine["decode"]["slots"]] == [*(0, 288, 576, 832, 1088, 1376)]
    assert len(nine["wrong"]) == 4


def test_sizes_that_are_not_known_are_null_in_the_document(run, named) -> None:
    model = named("serving/window.onnx")
    found = document(run("compare", model, model, "--full-transfer", "--format=json").out)
    assert found["verdict"]["outcome"] == "works"
    assert found["verdict"]["longest"] is None
    one, *_ = found["transfers"]
    assert one["prefill"]["bytes"] is None
    full = named("serving/window_whole.onnx")
    found = document(run("compare", full, model, "--format=json").out)
    assert found["verdict"]["beyond"] == "sliding_window"
    assert found["verdict"]["corrupt"] == [{"first": None, "last": None}]
    assert found["verdict"]["first_wrong"] is None


def test_one_model_compiled_in_two_ways(run, named) -> None:
    model = named("serving/window.onnx")
    other = ("--dim", "prefill:sliding_window=32", "--dim", "ctx_len=32")
    outcome = run("compare", model, model, *other, "--dim", "decode:sliding_window=8")
    assert outcome.code == 1
    assert "longer than 8" in outcome.out


def test_bytes_that_depend_on_a_window_of_unknown_size_are_not_shown(run, named, tmp_path) -> None:
    model, page = named("serving/window.onnx"), tmp_path / "page.html"
    outcome = run(
        "compare", model, model, "--dim", "ctx_len=32", "--html", page, "--format", "json"
    )
    transfers = {each["tokens"]: each["decode"] for each in document(outcome.out)["transfers"]}
    assert transfers[1]["bytes"] == 6 * 32
    assert transfers[32]["bytes"] is None
    assert [slot["offset"] for slot in transfers[32]["slots"]] == [0, 1024, 2048, *[None] * 3]
    text = page.read_text("utf-8")
    assert "no memory is drawn: pass --dim sliding_window=SIZE" in text
    assert "<svg" not in text
    run("compare", model, model, *SIZES, "--html", page)
    assert "<svg" in page.read_text("utf-8")


def test_a_plain_model_is_told_and_compared_all_the_same(run, named) -> None:
    plain, model = FIXTURES / "plain" / "decoder.onnx", named("decoder.onnx")
    outcome = run("compare", plain, model)
    assert outcome.code == 1
    assert "would fail" in outcome.out
    assert "on prefill" in outcome.out
    assert "after a rename" in outcome.out
    assert "4 buffers" in outcome.out
    assert "--target vllm-qaic" in outcome.err
    found = document(run("compare", plain, model, "--format", "json").out)
    assert (found["verdict"]["outcome"], found["verdict"]["renamed"]) == ("fails", "works")
    assert found["pairs"][0]["prefill"]["input"] == "past_key.0"
    assert not found["prefill"]["selected"]


def test_windows_and_a_layout_file_stand_for_a_model(run, tmp_path: Path) -> None:
    windows = tmp_path / "windows"
    assert run(FIXTURES / "plain" / "windows", "--prefix", TOKEN, "-d", windows, "-q").code == 0
    written = write_layout(run, tmp_path / "side.json", windows, "--dim", "ctx_len=16")
    outcome = run("compare", windows, written)
    assert (outcome.code, outcome.err) == (0, "")
    assert "6 buffers" in outcome.out
    assert "16 tokens" in outcome.out
    outcome = run("compare", written, windows, "--dim", "decode:ctx_len=8")
    assert "8 tokens" in outcome.out


def test_what_a_layout_file_says_of_sizes_is_not_overruled(run, named, tmp_path: Path) -> None:
    model = named("serving/window.onnx")
    sizes = ("--dim", "ctx_len=64", "--dim", "sliding_window=8")
    written = write_layout(run, tmp_path / "side.json", model, *sizes)
    outcome = run("compare", written, model, "--dim", "ctx_len=64", "--dim", "sliding_window=16")
    assert (outcome.code, outcome.out) == (2, "")
    assert "sliding_window=8," in outcome.err
    assert "--dim says 16" in outcome.err
    outcome = run("compare", written, model, "--dim", "decode:sliding_window=16")
    assert outcome.code == 1
    assert "8 and 16" in outcome.out


def test_the_state_of_a_hybrid_needs_the_full_transfer(run, named) -> None:
    model = named("hybrid.onnx")
    assert "(KV605)" in run("compare", model, model).out
    assert run("compare", model, model, "--full-transfer").code == 0


def test_prefill_that_samples_on_the_device_stops_and_decode_does_not(run, named) -> None:
    sampler, decoder = named("sampler.onnx"), named("decoder.onnx")
    assert codes(document(run("compare", sampler, sampler, "--format", "json").out)) == ["KV604"]
    assert "KV604" not in run("compare", decoder, sampler).err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--dim", "decod:a=2"), "--dim 'decod:': no such side (did you mean decode:?)"),
        (("--format", "jsn"), "'jsn' is not one of"),
        (("--target", "vllm-qaik"), "vllm-qaic?"),
        (
            ("--dim", "ctx=4"),
            "--dim ctx: ",
        ),
        (("--dim", "decode:ctx=4"), "--dim decode:ctx: "),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(run, named, args, said) -> None:
    model = named("decoder.onnx")
    outcome = run("compare", model, model, *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
    found = document(run("compare", model, model, *args, "--format", "json").out)
    assert (found["exit_code"], found["verdict"]) == (2, None)


def test_a_side_that_is_not_there_is_an_error(run, named) -> None:
    outcome = run("compare", named("decoder.onnx"), "nowhere.onnx")
    assert outcome.code == 2
    assert "nowhere.onnx" in outcome.err


def test_a_side_without_kv_is_no_hand_off(run, named) -> None:
    encoder, decoder = FIXTURES / "plain/vlm_dual/encoder.onnx", named("decoder.onnx")
    outcome = run("compare", encoder, decoder)
    assert outcome.code == 1
    assert f"({encoder})" in outcome.out
    assert "(KV001)" in outcome.out
    assert outcome.err.startswith(f"{encoder} -> {decoder}: error KV001: prefill ({encoder}) has ")
    assert outcome.err.count("\n") == 2  # the finding and its fix
    found = document(run("compare", decoder, encoder, "--format", "json").out)
    assert (codes(found), found["pairs"]) == (["KV001"], [])


def test_sides_are_called_what_was_typed(run, named, tmp_path: Path, monkeypatch) -> None:
    full, window = named("serving/window_whole.onnx"), named("serving/window.onnx")
    monkeypatch.chdir(tmp_path)
    write_layout(run, Path("full.json"), full)
    Path("set").mkdir()
    window.rename("set/window.onnx")
    outcome = run("compare", "full.json", "set")
    assert outcome.err.count("full.json -> set: error KV614") == 1
    outcome = run("compare", "full.json", "set", "--format", "github")
    assert outcome.out.startswith("::error file=set,")


def test_a_layout_file_with_sizes_and_a_model_without_differ_in_windows_only(
    run, named, tmp_path: Path
) -> None:
    model = named("serving/window.onnx")
    sizes = ("--dim", "ctx_len=4096", "--dim", "sliding_window=128")
    sized = write_layout(run, tmp_path / "sized.json", model, *sizes)
    outcome = run("compare", sized, model)
    assert "cannot decide" in outcome.out
    assert "KV614" in outcome.out
    assert "--dim decode:sliding_window=SIZE" in outcome.out
    assert outcome.err.count("error") == 1
    assert "-> pass --dim decode:sliding_window=SIZE\n" in outcome.err
    decode = ("--dim", "decode:sliding_window=128")
    assert run("compare", sized, model, *decode).code == 0


def broken(path: Path, *, layers: int) -> Path:
    """A model whose retained outputs stand among its inputs, too."""
    model = onnx.load(FIXTURES / "plain" / "decoder.onnx")
    kept = [one for one in model.graph.output if "State" in one.name][: 2 * layers]
    for node in model.graph.node:
        for at, name in enumerate(node.output):
            node.output[at] = f"was_{name}" if name in {one.name for one in kept} else name
    model.graph.input.extend(kept)
    onnx.save(model, path)
    return path


def test_a_broken_model_is_the_cause_and_told_once(run, tmp_path: Path) -> None:
    path = broken(tmp_path / "broken.onnx", layers=2)
    outcome = run("compare", path, path)
    assert outcome.code == 1
    assert re.search(r"after a rename, it .*: [^:]*\(KV10[56]\)$", outcome.out.splitlines()[0])
    assert "(KV616)" not in outcome.out.partition("\n")[2]
    said = re.findall(r"error (KV10\d): ", outcome.err)
    assert said == sorted(said, reverse=True)
    assert "-v shows each" in outcome.err
    full = run("compare", path, path, "-v")
    assert "-v shows" not in full.err
    assert len(re.findall("error KV106: ", full.err)) == 4


def test_a_pipe_gets_colour_in_verdict_and_table_or_in_neither(run, named, monkeypatch) -> None:
    model = named("decoder.onnx")
    assert "\x1b" not in run("compare", model, model).out
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    verdict, _, row = run("compare", model, model).out.splitlines()
    assert verdict.startswith("\x1b[32;1m")
    assert row.endswith("  \x1b[32mok\x1b[0m")


@pytest.mark.parametrize("line", re.findall(
    r"^onnxkvrename (compare (?:prefill|decode)\.onnx .*?)(?: +#.*)?$",
    (FIXTURES.parent / "docs" / "compare.md").read_text("utf-8"),
    re.MULTILINE,
))  # fmt: skip
def test_the_lines_of_the_page_can_be_run(
    line: str, run, named, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, model in (("prefill", "serving/window_whole"), ("decode", "serving/window")):
        named(f"{model}.onnx").rename(f"{name}.onnx")
    assert run(*shlex.split(line)).code == 1


def test_quiet_says_only_what_is_wrong(run, named) -> None:
    full, window = named("serving/window_whole.onnx"), named("serving/window.onnx")
    outcome = run("compare", full, full, "-q")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    outcome = run("compare", full, window, "-q")
    assert (outcome.out, "KV614" in outcome.err) == ("", True)


def test_github_shows_it_beside_the_decode_model(run, named) -> None:
    full, window = named("serving/window_whole.onnx"), named("serving/window.onnx")
    lines = run("compare", full, window, *SIZES, "--format", "github").out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::error", "::notice"]
    assert all(f"file={window}" in line for line in lines)
    assert lines[-1].endswith("(KV614)")


def test_a_terminal_gets_a_table_in_colour(run, named, monkeypatch) -> None:
    full, window = named("serving/window_whole.onnx"), named("serving/window.onnx")
    monkeypatch.setattr("onnxkvrename.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    outcome = run("compare", full, window, *SIZES)
    assert "\x1b[31;1m" in outcome.out
    assert "KV614" in outcome.out


def test_a_name_that_would_paint_or_break_lines_is_shown_escaped(run, tmp_path: Path) -> None:
    """The scope of a name is anything at all."""
    model = onnx.load(FIXTURES / "plain" / "decoder.onnx")
    for values in (model.graph.input, model.graph.output):
        for one in values:
            if one.name.startswith("past_"):
                one.name = f"[red]\x1b[2J\n/{one.name.replace('_Retained', f'_{TOKEN}_Retained')}"
                one.name += "" if one.name.endswith("State") else f"_{TOKEN}"
    path = tmp_path / "hostile.onnx"
    onnx.save(model, path)
    outcome = run("compare", path, FIXTURES / "plain" / "decoder.onnx")
    assert "\x1b" not in outcome.out + outcome.err
    document(run("compare", path, path, "--format", "json").out)


# Real exports.

real = pytest.mark.skipif(
    not EXPORTS.is_dir(), reason=f"no real exports to compare: {EXPORTS} is not there"
)
DECODERS = sorted(path for path in EXPORTS.glob("*/plain-*/*.onnx") if "Encoder" not in path.name)


def export(kind: str, pattern: str) -> Path:
    return next(EXPORTS.glob(f"{kind}/{pattern}"))


@real
@pytest.mark.parametrize("path", thin(DECODERS, 2), ids=lambda path: path.parent.parent.name)
def test_a_real_export_hands_over_to_itself_once_it_is_renamed(run, path, tmp_path) -> None:
    if path.parent.parent.name == SAMPLER:
        pytest.skip("it has no logits, without which prefill stops")
    renamed = tmp_path / path.name
    rename(path, TOKEN, output=renamed)
    outcome = run("compare", renamed, renamed)
    if path.parent.parent.name == GROWING:
        assert outcome.code == 1
        assert "fail at start-up" in outcome.out
        return
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("hand-off works: ")


@real
@pytest.mark.parametrize("path", thin(DECODERS, 2), ids=lambda path: path.parent.parent.name)
def test_a_plain_export_and_its_twin_lack_only_the_token(run, path) -> None:
    kind = path.parent.parent.name
    if kind == BROKEN:
        pytest.skip("its twin has names that stand on both sides")
    twin = export(kind, f"VLLM-*/{path.name}")
    found = document(run("compare", path, twin, "--format", "json").out)
    stopping = {SAMPLER: ["KV604"], GROWING: ["KV120", "KV120"]}.get(kind, [])
    assert codes(found) == ["KV616", "KV616", *stopping]
    assert found["verdict"]["renamed"] == ("fails" if stopping else "works")


@real
def test_a_real_decoder_without_its_window_would_corrupt_long_prompts(run, tmp_path) -> None:
    """Return a decoder exported without chunking: the context replaces the window."""
    window = tmp_path / "window.onnx"
    rename(export("gemma3vlm_dual", "plain-*/Gemma3DecoderWrapper.onnx"), TOKEN, output=window)
    model = onnx.load(window, load_external_data=False)
    changed = 0
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "sliding_window":
                dim.dim_param, changed = "ctx_len", changed + 1
    assert changed
    full = tmp_path / "full.onnx"
    full.write_bytes(model.SerializeToString())
    sizes = ("--dim", "ctx_len=4096", "--dim", "sliding_window=512")
    found = document(run("compare", full, window, *sizes, "--format", "json").out)
    assert found["verdict"]["corrupt"] == [{"first": 513, "last": 4096}]
    assert "KV614" in codes(found)
    found = document(run("compare", window, full, *sizes, "--format", "json").out)
    assert found["verdict"]["refused"] == [{"first": 513, "last": 4096}]


@real
def test_real_windows_hand_over_to_their_merge(run) -> None:
    (merged,) = EXPORTS.glob("lw_qwen3moe/VLLM-*/merged_*.onnx")
    windows = sorted(EXPORTS.glob("lw_qwen3moe/VLLM-*/onnx_layerwise_tmp"))
    assert windows
    found = document(run("compare", windows[0], merged, "--format", "json").out)
    assert codes(found) == ["KV616"]
    assert found["verdict"]["renamed"] == "works"


@real
def test_a_real_model_with_fewer_layers_is_another_one_and_no_draft(run) -> None:
    few, many = (export(kind, "VLLM-*/*.onnx") for kind in ("llama2l", "llama12l"))
    found = document(run("compare", few, many, "--format", "json").out)
    assert codes(found) == ["KV616", "KV611"]
    text = found["verdict"]["sentence"]
    assert "every prompt" in text
    assert "layers 2-11" in text


@real
def test_a_real_export_that_is_broken_is_named_as_the_cause(run) -> None:
    model = export(BROKEN, "VLLM-*/*.onnx")
    outcome = run("compare", model, model)
    verdict, _, row = outcome.out.splitlines()
    assert "after a rename" in verdict
    assert "corrupt every" in verdict
    assert "(KV106)" in row


def test_names_of_another_exporter_are_not_blamed_on_a_dtype(tmp_path: Path, run) -> None:
    """A token makes the inputs known, but the outputs still end in nothing that is selected."""
    model, rules = save_decoder(tmp_path)
    outcome = run("compare", model, model, "--rules", rules)
    assert outcome.code == 1
    assert "after a rename" in outcome.out
    assert "KV624" in outcome.out
    assert "KV610" not in outcome.out + outcome.err
    assert ("error KV624: 4 outputs (first: present.0.key_vllmKvCache)") in outcome.err
    assert "error KV120: present.0.key_vllmKvCache" in outcome.err


def test_names_that_are_renamed_already_are_not_said_to_lack_the_token(tmp_path: Path, run) -> None:
    model, rules = save_decoder(tmp_path)
    assert run(model, "--rules", rules, "--prefix", "vllmKvCache", "-q").code == 0
    outcome = run("compare", model, model, "--rules", rules)
    assert "KV616" not in outcome.out + outcome.err
    assert "error KV624: 4 outputs (first: present.0.key_vllmKvCache)" in outcome.err


def test_a_page_is_written_beside_the_answer(run, named, tmp_path: Path) -> None:
    full, window = named("serving/window_whole.onnx"), named("serving/window.onnx")
    page = tmp_path / "page.html"
    plain = run("compare", full, window, *SIZES)
    outcome = run("compare", full, window, *SIZES, "--html", page)
    assert outcome == plain._replace(err=f"{plain.err}{page}: page written\n")
    text = page.read_text("utf-8")
    assert "onnxkvrename compare" in text[:512]
    assert "4 of 6 buffers wrong (KV614)" in text
    assert str(full)[-30:] in text
    quiet = run("compare", full, window, *SIZES, "--html", page, "--quiet", "--format", "json")
    assert (quiet.code, document(quiet.out)["exit_code"]) == (1, 1)
    assert page.read_text("utf-8") == text


def test_a_page_replaces_an_earlier_page_and_nothing_else(run, named, tmp_path: Path) -> None:
    model, page = named("decoder.onnx"), tmp_path / "page.html"
    first = run("compare", model, model, "--html", page)
    assert (first.code, first.err) == (0, f"{page}: page written\n")
    assert run("compare", model, model, "--html", page, "-q").err == ""
    assert run("compare", model, model, "--dim", "ctx_len=3", "--html", page).code == 0
    assert ">3 tokens<" in page.read_text("utf-8")
    for mine in ("<!DOCTYPE html>mine", "# Notes\nThe pages were made by onnxkvrename compare.\n"):
        page.write_text(mine)
        outcome = run("compare", model, model, "--html", page)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
        assert "already exists" in outcome.err
        assert page.read_text() == mine
    assert run("compare", model, model, "--html", page, "--force").code == 0
    assert "mine" not in page.read_text("utf-8")


def test_a_page_never_replaces_what_is_compared(run, named, tmp_path: Path) -> None:
    model = named("decoder.onnx")
    written = write_layout(run, tmp_path / "side.json", model, "--dim", "ctx_len=16")
    for path in (model, written):
        content = path.read_bytes()
        outcome = run("compare", model, written, "--html", path, "--force")
        assert outcome.code == 2
        assert f"{path.name}: is " in outcome.err
        assert path.read_bytes() == content


def test_a_comparison_that_cannot_be_made_writes_no_page(run, named, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    outcome = run("compare", named("decoder.onnx"), tmp_path / "none.onnx", "--html", page)
    assert outcome.code == 2
    assert not page.exists()


def test_the_page_of_a_broken_model_lists_its_findings(run, named, tmp_path: Path) -> None:
    page, model = tmp_path / "page.html", named("decoder.onnx")
    broken = tmp_path / "broken.onnx"
    graph = onnx.load(model)
    del graph.graph.output[1]
    onnx.save(graph, broken)
    assert run("compare", model, broken, "--html", page).code == 1
    text = page.read_text("utf-8")
    assert "KV102" in text
    assert "broken.onnx" in text


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("ctx=5", "--dim decode:ctx: "),
        ("ctx=5", "(did you mean ctx_len?)"),
        ("ctx_len", "--dim 'decode:ctx_len': pass "),
        ("ctx_len=0", "--dim 'decode:ctx_len=0'"),
    ],
)
def test_a_wrong_size_names_the_option_it_was_passed_to(size: str, message: str, run) -> None:
    model = FIXTURES / "plain" / "decoder.onnx"
    outcome = run("compare", model, model, "--dim", f"decode:{size}")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert message in outcome.err


def test_a_decode_model_without_logits_gets_the_token_alone(run, tmp_path: Path) -> None:
    """A rename for the consumer refuses it, as only a model for decode may lack them."""
    prefill, decode = tmp_path / "prefill.onnx", tmp_path / "decode.onnx"
    rename(FIXTURES / "plain" / "decoder.onnx", TOKEN, output=prefill)
    model = onnx.load(FIXTURES / "plain" / "decoder.onnx")
    model.graph.output[0].name = "next_tokens"
    for each in model.graph.node:
        each.output[:] = ["next_tokens" if name == "logits" else name for name in each.output]
    onnx.save(model, decode)
    (finding,) = document(run("compare", prefill, decode, "--format", "json").out)["findings"]
    assert (finding["code"], finding["hint"]) == (
        "KV616",
        f"`onnxkvrename {decode} --prefix vllmKvCache`",
    )
    assert run(decode, "--prefix", "vllmKvCache").code == 0
    assert run("compare", prefill, decode).code == 0


@pytest.mark.parametrize("command", ["compare", "verify"])
def test_a_verdict_is_wrapped_by_words_on_a_terminal(run, named, monkeypatch, command) -> None:
    full, window = named("serving/window_whole.onnx"), named("serving/window.onnx")
    monkeypatch.chdir(full.parent)
    models = [full.name, window.name] if command == "compare" else [full.name]
    piped = run(command, *models).out.splitlines()[0]
    monkeypatch.setattr("onnxkvrename.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    first, second, *_ = run(command, *models).out.splitlines()
    assert len(piped) > 60 >= len(first)
    assert piped.startswith(f"{first} {second.strip()}")
