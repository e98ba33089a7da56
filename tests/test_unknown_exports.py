"""Whoever has an export that no page names gets through with `--prefix` and what is printed.

The exports are not in the repository: see `real_exports`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Run
from exporters_table import OTHERS, TOKEN, Row, read_table
from hints import find_commands, run_commands
from tiers import thin

ROWS = read_table()
FOUND = [row for row in ROWS if row.options]
NO_CACHE = {
    **dict.fromkeys(
        [
            *(f"optimum/{name}/encoder_model.onnx" for name in ("t5", "whisper")),
            *("new/optimum-marian/encoder_model.onnx", "new/mobius-bart/encoder/model.onnx"),
        ],
        "an encoder, whose decoder computes keys and values",
    ),
    "mobius/qwen3_5-ort-genai/embedding/model.onnx": "the embeddings of a decoder",
    "new/no-cache/adam_step.onnx": "moments of an optimizer",
    "new/no-cache/denoise_residual.onnx": "a residual around a block",
    "new/no-cache/kalman.onnx": "an estimate of a filter",
    "new/no-cache/tabular_profile_names.onnx": "features with the names of caches",
    "new/no-cache/unet_scheduler_step.onnx": "a step of a scheduler",
}
"""Exports that no command renames, and what they are."""
UNPROVED = {
    **dict.fromkeys(
        [
            *(f"optimum/{name}/decoder_model.onnx" for name in ("t5", "whisper")),
            "new/optimum-marian/decoder_model.onnx",
        ],
        "the first step, which takes no cache",
    ),
    "genai/whisper-fp32-t5/encoder.onnx": "an encoder that fills a decoder's caches",
}
"""Exports that are renamed by their names alone, and why their graphs show no pair."""
LISTED = {
    "dynamo/d_tuple.onnx": "cat_7 has the number of a value",
    "dynamo/e_static_lists.onnx": "so has index_put_2",
    "new/no-cache/lstm_state.onnx": "no number in hn and cn",
    "new/no-cache/rl_policy_gru.onnx": "no number",
    "new/silero-vad/model.onnx": "no number",
    "new/tf2onnx-lstmcell/model.onnx": "no number",
}
"""Exports of which rules can only list the names, and why."""
OTHER_SIZES = {
    **{f"optimum/{name}/model.onnx": "optimum/llama/model.onnx" for name in ("bloom", "gemma2")},
    **{
        f"{name}/decoder_model_merged.onnx": "optimum/t5/decoder_model_merged.onnx"
        for name in ("optimum/whisper", "new/optimum-marian")
    },
    "optimum/t5/decoder_model_merged.onnx": "new/optimum-marian/decoder_model_merged.onnx",
    "genai/llama-fp32/model.onnx": "genai/gemma2-fp32/model.onnx",
    "new/genai-llama-dml/model.onnx": "genai/llama-int4/model.onnx",
    "../exports/llama12l/plain-19ac6cb1fcc2b993/LlamaForCausalLM.onnx": (
        "../exports/llama2l/plain-00773fda0d442a7c/LlamaForCausalLM.onnx"
    ),
    "../exports/llama2l/plain-00773fda0d442a7c/LlamaForCausalLM.onnx": (
        "../exports/llama12l/plain-19ac6cb1fcc2b993/LlamaForCausalLM.onnx"
    ),
}
"""Exports, each with one of other sizes by the same exporter."""
pytestmark = pytest.mark.skipif(
    not OTHERS.is_dir(), reason=f"no other exporters' models: no {OTHERS}"
)


def list_cases(rows: list[Row], default: int) -> list[object]:
    return thin([pytest.param(row, id=row.export) for row in rows], default)


@pytest.mark.parametrize(
    "row",
    [
        *list_cases([row for row in FOUND if not row.profile], len(FOUND)),
        *list_cases([row for row in FOUND if row.profile], 2),
    ],
)
def test_an_export_is_renamed_checked_and_restored_with_the_printed_commands(
    row: Row, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the rules are written
    source, renamed, back = OTHERS / row.export, tmp_path / "new.onnx", tmp_path / "back.onnx"
    before = source.read_bytes()
    sidecars = ["--sidecars", "off"] if "--sidecars off" in row.options else []
    outcome = run(source, "--prefix", TOKEN, "-o", renamed, *sidecars)
    rules = []
    if not row.profile:
        assert (outcome.code, renamed.exists(), "error KV001" in outcome.err) == (1, False, True)
        outcome = run_commands(outcome.err, run)
        unknown = run("verify", renamed)
        assert (unknown.code, "add `--rules FILE`" in unknown.err) == (1, True)
        rules = ["--rules", "rules.toml"]
    assert (outcome.code, source.read_bytes()) == (0, before)
    names = row.names.partition(" ")[0]
    assert f"{names} names changed" in outcome.err
    assert run("verify", renamed, *rules).code == 0
    stripped = run(renamed, "--strip", "-o", back, *sidecars, *rules)
    assert (stripped.code, back.read_bytes() == before) == (0, True)


@pytest.mark.parametrize("row", list_cases([row for row in ROWS if not row.options], 2))
def test_an_export_without_a_cache_stays_and_no_command_is_offered(
    row: Row, tmp_path: Path, run: Run
) -> None:
    source, renamed = OTHERS / row.export, tmp_path / "new.onnx"
    before = source.read_bytes()
    outcome = run(source, "--prefix", TOKEN, "-o", renamed)
    assert (outcome.code, renamed.exists(), source.read_bytes() == before) == (1, False, True)
    assert find_commands(outcome.err) == []
    no_cache = "no cache found in the graph either"
    other_value = "different values with the names of caches"
    assert (no_cache in outcome.err) != (other_value in outcome.err)


def test_each_export_is_in_a_table() -> None:
    exports = {path.relative_to(OTHERS).as_posix() for path in OTHERS.rglob("*.onnx")}
    assert exports <= {row.export for row in ROWS}
    assert NO_CACHE.keys() == {row.export for row in ROWS if not row.options}


def rename_by_rules(export: str, rules: Path, run: Run) -> set[str]:
    """Rename, verify and strip an export by rules, and return the lines of its new names."""
    source = OTHERS / export
    options = ("--sidecars", "off", "--rules", rules)
    renamed = run(source, "--prefix", TOKEN, "-o", "new.onnx", *options)
    assert renamed.code == 0, renamed.err
    assert run("verify", "new.onnx", "--rules", rules).code == 0
    assert run("new.onnx", "--strip", "-o", "back.onnx", *options).code == 0
    assert Path("back.onnx").read_bytes() == source.read_bytes()
    for result in ("new.onnx", "back.onnx"):
        Path(result).unlink()
    return {*renamed.out.splitlines()}


@pytest.mark.parametrize("row", list_cases([row for row in FOUND if row.export not in UNPROVED], 5))
def test_the_graph_of_an_export_writes_rules_for_all_layers(
    row: Row, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = run("pairs", OTHERS / row.export, "--as", "rules")
    assert written.code == 0
    Path("rules.toml").write_text(written.out, "utf-8")
    assert ("{layer}" in written.out) == (row.export not in LISTED)
    if row.export not in LISTED:
        assert "layer = " not in written.out
        assert written.out.count("[[kv]]") <= 3
    assert rename_by_rules(row.export, Path("rules.toml"), run)


@pytest.mark.parametrize("export", UNPROVED)
def test_the_graph_of_a_first_step_shows_no_pair(export: str, run: Run) -> None:
    outcome = run("pairs", OTHERS / export, "--as", "rules")
    assert (outcome.code, "no cache found in the graph" in outcome.err) == (2, True)


@pytest.mark.parametrize("export", thin(OTHER_SIZES, 3))
def test_the_rules_of_one_export_rename_another_size(
    export: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (export, OTHER_SIZES[export]):
        if not (OTHERS / path).is_file():
            pytest.skip(f"no real export: no {OTHERS / path}")
    rules = {name: Path(f"{name}.toml") for name in ("own", "other")}
    for name, path in (("own", export), ("other", OTHER_SIZES[export])):
        rules[name].write_text(run("pairs", OTHERS / path, "--as", "rules").out, "utf-8")
    own = rename_by_rules(export, rules["own"], run)
    assert rename_by_rules(export, rules["other"], run) == own != set()
