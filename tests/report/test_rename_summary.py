from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import models
import pytest
from models import node, saved
from real_exports import EXPORTS
from terminals import run_on_terminal
from window_sets import write_windows

from onnxkvrename import Finding, ModelReport, Report, rename
from onnxkvrename.report.rename_text import render_rename, render_states
from onnxkvrename.rules.request import Request

HOSTILE = "[red]\x1b[2J\u202e:smiley:[/red]\\/past_key.0"
FAULT = Finding("KV101", "error", "past_key.0", "is wrong", "export again")
SHOWN = "[red]\\x1b[2J\\u202e:smiley:[/red]\\/past_key.0"


def drawn(
    *found: ModelReport, dry_run: bool = True, verbose: bool = False, width: int = 100
) -> str:
    lines = render_states(Report(found), width, dry_run=dry_run, verbose=verbose)
    return "".join(f"{line.text}\n" for line in lines)


def on_terminal(*args: object, cwd: Path | None = None, **environment: str) -> str:
    """Return the output of the command on a terminal of 100 columns."""
    kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
    code, output = run_on_terminal(
        [sys.executable, "-m", "onnxkvrename", *map(str, args)],
        {**kept, "LANG": "C.UTF-8", **environment},
        cwd,
    )
    assert code in (0, 1)
    return output


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model whose names would move the cursor, turn the text and draw smileys."""
    model = models.decoder(node("Neg", ["x"], ["a\nb_RetainedState"]))
    for part in model.graph.node:
        for ends in (part.input, part.output):
            ends[:] = [end.replace("past_key.0", HOSTILE) for end in ends]
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("past_key.0", HOSTILE)
    model.graph.output.append(models.info("a\nb_RetainedState"))
    return saved(model, tmp_path / "hostile.onnx")


def test_a_summary_says_what_was_found_renamed_and_kept_and_what_to_do_next(
    decoder: Path,
) -> None:
    found = rename(decoder, "VLLM")._replace(
        path="m.onnx", output="m.onnx", feed_back_call='compile(onnx_path="m.onnx")'
    )
    assert [" ".join(line.split()) for line in drawn(found).splitlines()] == [
        "m.onnx: 8 names changed",
        "attention past_key, past_value of layers 0-1",
        "names past_key.0 -> past_key.0_VLLM",
        'next compile(onnx_path="m.onnx")',
    ]


def test_what_is_kept_is_told_with_the_reason(tmp_path: Path) -> None:
    model = models.decoder()
    model.graph.output.append(models.info("vision_embeds_RetainedState"))
    path = saved(model, tmp_path / "m.onnx")
    text = drawn(rename(path, "VLLM", dry_run=True))
    assert re.search(r"kept +vision: vision_embeds_RetainedState\n", text)
    assert "logits" not in text


def test_verbose_shows_each_name_on_a_terminal_too(decoder: Path) -> None:
    report, request = Report((rename(decoder, "VLLM", dry_run=True),)), Request(dry_run=True)
    few, every = (
        [line.text for line in render_rename(report, request._replace(verbose=verbose), 80)]
        for verbose in (False, True)
    )
    assert every[8:] == few
    assert every[7] == "past_value.1_RetainedState -> past_value.1_VLLM_RetainedState"


def test_a_result_elsewhere_is_pointed_to(decoder: Path) -> None:
    found = rename(decoder, "VLLM", output=decoder.with_name("new.onnx"))
    assert re.search(r"8 names changed -> \S*new\.onnx", drawn(found, dry_run=False, width=300))


def test_many_models_with_one_outcome_are_one_line_and_there_is_a_total(decoder: Path) -> None:
    found = rename(decoder, "VLLM", dry_run=True)
    failed = found._replace(path="bad.onnx", status="failed", findings=(FAULT,))
    models = [found._replace(path=f"set/{n}.onnx", output=f"set/{n}.onnx") for n in range(4)]
    assert "attention" in drawn(*models)
    assert drawn(failed, *models, width=300).splitlines() == [
        "4 files in set (first: 0.onnx): 8 names would change in each",
        "5 models: 4 would change, 0 unchanged, 1 failed; 20 KV buffers",
    ]
    assert len(drawn(failed, *models, verbose=True, width=300).splitlines()) == 14


def test_many_models_whose_counts_differ_are_one_line_with_their_range(decoder: Path) -> None:
    found = rename(decoder, "VLLM", dry_run=True)
    name_maps = [dict(list(found.name_map.items())[:count]) for count in (8, 2, 4, 8, 8)]
    models = [
        found._replace(path=f"set/{n}.onnx", output=f"set/{n}.onnx", name_map=name_map)
        for n, name_map in enumerate(name_maps)
    ]
    models[4] = models[4]._replace(function_name_map={"a": "b"})
    assert drawn(*models, width=300).splitlines()[:2] == [
        "4 files in set (first: 0.onnx): 2 to 8 names would change in each",
        "set/4.onnx: 8 names would change; 1 in local functions as well",
    ]


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
def test_a_plan_for_the_real_exports_is_read_on_one_screen(tmp_path: Path) -> None:
    shutil.copytree(EXPORTS, tmp_path / "exports", copy_function=shutil.copyfile)
    call = ("exports", "--target", "vllm-qaic", "-n")
    text = on_terminal(*call, cwd=tmp_path, TERM="dumb")  # no bars, if the machine is busy
    assert sum(-(-len(row) // 100) for row in text.splitlines()) <= 40
    severities = re.findall(r"(error|warning)\s+KV", text)
    assert len(severities) >= 8
    assert severities == sorted(severities)


def test_those_left_alone_are_counted_after_the_model_that_failed(decoder: Path) -> None:
    found = rename(decoder, "VLLM", dry_run=True)._replace(path="m.onnx", output="m.onnx")
    failed = found._replace(path="bad.onnx", status="failed", findings=(FAULT,))
    assert drawn(found, found, failed, dry_run=False, width=300).splitlines() == [
        "bad.onnx: failed: nothing was written",
        "3 models: 0 renamed, 0 unchanged, 1 failed, 2 left alone (another model failed); "
        "nothing was written",
    ]


def test_a_refused_run_points_to_no_result(decoder: Path) -> None:
    done = rename(decoder, "VLLM")._replace(status="unchanged", name_map={}, output="out/m.onnx")
    failed = done._replace(path="bad.onnx", status="failed", findings=(FAULT,))
    call = done.feed_back_call
    assert call is not None
    here = done._replace(output=done.path)
    for reports in ((failed, done), (failed, here), (failed, *[done] * 5)):
        text = drawn(*reports, dry_run=False, width=300)
        assert "unchanged" in text
        assert "->" not in text
        assert call not in text
    assert "unchanged: no token -> out/m.onnx" in drawn(done, dry_run=False, width=300)
    assert "\n  result  out/m.onnx\n" in drawn(done, dry_run=False, width=60)
    assert drawn(*[done] * 5, dry_run=False, width=300).splitlines()[0].endswith(" -> out")
    assert call in drawn(done, dry_run=False, width=300)
    assert call not in drawn(done, dry_run=True, width=300)  # out/m.onnx is not there yet


def test_a_passed_check_has_a_line_with_what_it_rests_on(decoder: Path) -> None:
    done = rename(decoder, "VLLM", dry_run=True)
    taken, proved = done._replace(consumer="C"), done._replace(proved=3)
    assert "C" not in drawn(done).split()
    both = drawn(taken, taken, width=200)
    assert "checked for C: it selects, pairs and moves all buffers of 2 models" in both
    assert "verified: 3 of 4 buffers retained" in drawn(proved, width=200)
    failed = taken._replace(proved=4, status="failed", findings=(FAULT,))
    for text in (drawn(failed, width=200), drawn(failed, taken, width=200)):
        assert "checked" not in text
        assert "verified" not in text


def test_a_dry_run_points_to_where_results_would_go(decoder: Path) -> None:
    found = rename(decoder, "VLLM", output=decoder.with_name("new.onnx"), dry_run=True)
    assert re.search(r"8 names would change -> \S*new\.onnx", drawn(found, width=300))


@pytest.mark.parametrize(
    ("layers", "text"),
    [([3], "of layer 3"), ([0, 1, 2, 4, 6, 7], "of layers 0-2, 4, 6-7")],
)
def test_layers_are_told_as_ranges(layers: list[int], text: str, decoder: Path) -> None:
    found = rename(decoder, "VLLM", dry_run=True)
    pairs = tuple(found.pairs[0]._replace(layer=layer) for layer in layers)
    assert text in drawn(found._replace(pairs=pairs))


def test_the_call_to_copy_is_never_broken_into_lines(decoder: Path) -> None:
    call = "compile(" + "x" * 200 + ")"
    found = rename(decoder, "VLLM")._replace(feed_back_call=call)
    assert call in drawn(found, width=20)


def test_hostile_names_are_no_markup(hostile: Path) -> None:
    found = rename(hostile, "VLLM", dry_run=True)
    text = drawn(found, verbose=True, width=300)
    assert text.count(f"{SHOWN}_VLLM") == 1  # as the first name


def test_hostile_names_do_nothing_to_a_terminal(hostile: Path) -> None:
    text = on_terminal(hostile, "--prefix", "VLLM", "-n", "-v", TERM="dumb", COLUMNS="300")
    assert SHOWN in text
    assert "a\\x0ab_RetainedState" in text
    assert not set(text) & {"\x1b", "\u202e"}


def test_hostile_names_do_nothing_to_a_pipe(hostile: Path, run) -> None:
    outcome = run(hostile, "--prefix", "VLLM", "-n")
    assert f"{SHOWN} -> {SHOWN}_VLLM\n" in outcome.out
    assert "a\\x0ab_RetainedState" in outcome.err
    assert not set(outcome.out + outcome.err) & {"\x1b", "\u202e"}


def test_colour_is_for_terminals_unless_the_environment_says_otherwise(
    decoder: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (decoder, "--prefix", "VLLM", "-n")
    assert "\x1b[" in on_terminal(*args)
    assert "\x1b" not in on_terminal(*args, NO_COLOR="1")
    assert "\x1b" not in on_terminal(*args, TERM="dumb")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b" not in run(*args).err
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[33m8 names would change" in run(*args).err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(*args).err


def test_a_terminal_gets_the_summary_and_the_call(decoder: Path) -> None:
    text = on_terminal(decoder, "--prefix", "VLLM", NO_COLOR="1")
    assert "8 names changed" in " ".join(text.split())
    assert f'model.compile(onnx_path="{decoder}", kv_cache_prefix="VLLM")' in text
    assert on_terminal(decoder, "--prefix", "VLLM", "-q") == ""


def test_a_terminal_of_one_column_is_no_reason_to_fail(decoder: Path) -> None:
    assert on_terminal(decoder, "--prefix", "VLLM", "-n", "-v", COLUMNS="1")


def test_findings_on_a_terminal_wrap_by_words(tmp_path: Path) -> None:
    path = saved(models.decoder(), tmp_path / "decoder.onnx")
    model = models.decoder()
    del model.graph.output[-1]
    path = saved(model, path)
    text = on_terminal(path.name, "--prefix", "VLLM", COLUMNS="60", NO_COLOR="1", cwd=tmp_path)
    finding = text[: text.index("failed")]
    assert all(len(line) <= 60 for line in finding.splitlines()[:-1])
    assert "KV102" in finding
    assert len(finding.splitlines()) > 2


def test_a_window_has_no_next_call_because_only_the_merged_file_is_compiled(tmp_path: Path) -> None:
    path = write_windows(tmp_path, 1) / "layer_0_1" / "Tiny_layer_tmp_0_1.onnx"
    merged = tmp_path / "merged_0-1.onnx"
    merged.write_bytes(path.read_bytes())
    window, whole = (rename(each, "VLLM", dry_run=True) for each in (path, merged))
    assert window.feed_back_call is None
    assert whole.feed_back_call is not None


PLACE = "a_directory_with_a_rather_long_name/and_one_below_it/new.onnx"


@pytest.mark.parametrize(
    ("look", "lines"),
    [
        (["-n"], ["decoder.onnx: 8 names would change", f"  would write  {PLACE}"]),
        ([], ["decoder.onnx: 8 names changed", f"  wrote  {PLACE}"]),
    ],
)
def test_a_path_that_does_not_fit_has_a_line_of_its_own(
    look: list[str], lines: list[str], decoder: Path
) -> None:
    call = (decoder.name, "--prefix", "VLLM", "-o", PLACE, *look)
    text = on_terminal(*call, cwd=decoder.parent, TERM="dumb", COLUMNS="80")
    assert text.splitlines()[:2] == lines
    if look:
        wide = on_terminal(*call, cwd=decoder.parent, TERM="dumb", COLUMNS="120")
        assert wide.startswith(f"{lines[0]} -> {PLACE}")


def test_a_result_that_is_there_already_has_no_list_of_names(decoder: Path) -> None:
    call = (decoder.name, "--prefix", "VLLM", "-o", "new.onnx")
    first, again = (
        on_terminal(*call, cwd=decoder.parent, TERM="dumb", COLUMNS="80") for _ in range(2)
    )
    assert "past_key.0 -> past_key.0_VLLM" in first
    assert again.startswith("decoder.onnx: unchanged: new.onnx is already up to date")
    assert "past_key.0" not in again
