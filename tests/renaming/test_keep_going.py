"""``--keep-going``: the sets without an error are renamed, the others stay as they are."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import genai_folders
import models
import onnx
import pytest
from exporter_models import HEAD, HEADS, Cache, build_model
from kill_commands import needs_fork, read_directory, run_and_kill
from models import saved
from window_sets import build_window, write_windows

from onnxkvrename import ModelError, rename, rename_all
from onnxkvrename.cli.main import main
from onnxkvrename.renaming.place import BatchWriter
from onnxkvrename.rules.change_sets import group_models
from onnxkvrename.rules.load import load_rules

V = ("--prefix", "VLLM", "-k")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three sets of windows; the second lacks a layer, and one of the third is no model."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        write_windows(Path(name), 3)
    Path("b/layer_1_2/Tiny_layer_tmp_1_2.onnx").unlink()
    Path("c/layer_1_2/Tiny_layer_tmp_1_2.onnx").write_bytes(b"no model")
    return tmp_path


def read_tokens(path: Path, token: bytes = b"_VLLM") -> set[bool]:
    """Return whether models have the token."""
    return {token in model.read_bytes() for model in Path(path).rglob("*.onnx")}


def test_good_sets_are_renamed_and_bad_ones_stay_whole(here: Path, run, snapshot) -> None:
    before = snapshot(here)
    assert run(".", "--prefix", "VLLM").code == 2
    assert snapshot(here) == before
    outcome = run(".", *V)
    assert outcome.code == 2  # c has a file that cannot be read
    assert [read_tokens(Path(name)) for name in "abc"] == [{True}, {False}, {False}]
    assert "error KV302" in outcome.err
    assert "error: c/layer_1_2/Tiny_layer_tmp_1_2.onnx: " in outcome.err
    assert "3 renamed, 0 unchanged, 2 failed, 3 left alone" in outcome.err.splitlines()[-1]
    assert not list(here.rglob(".onnxkvrename*"))


def test_a_finding_alone_exits_with_1_and_the_same_command_does_the_rest(here: Path, run) -> None:
    assert run("a", "b", *V).code == 1
    assert run("a", "b", *V, "--check").code == 1
    saved(build_window(1, 2), Path("b/layer_1_2/Tiny_layer_tmp_1_2.onnx"))
    assert run("a", "b", *V).code == 0
    assert read_tokens(Path("b")) == {True}
    assert run("a", "b", *V, "--check").code == 0


def test_a_dry_run_says_what_would_be_done(here: Path, run, snapshot) -> None:
    before = snapshot(here)
    outcome = run(".", *V, "-n")
    assert "3 would change, 0 unchanged, 2 failed" in outcome.err.splitlines()[-1]
    assert "3 would be left" in outcome.err
    assert snapshot(here) == before


def test_results_elsewhere_have_the_good_sets_only(here: Path, run, snapshot) -> None:
    before = snapshot(here)
    assert run("a", "b", "c", *V, "-d", "new").code == 2
    assert read_tokens(Path("new/a")) == {True}
    assert not Path("new/b").exists()
    assert {path: data for path, data in snapshot(here).items() if "new" not in str(path)} == before


@pytest.mark.parametrize("workers", [("--jobs", "2"), ("--jobs", "1")])
def test_processes_make_no_difference(workers: tuple[str, ...], here: Path, run) -> None:
    assert run(".", *V, *workers).code == 2
    assert [read_tokens(Path(name)) for name in "abc"] == [{True}, {False}, {False}]


def test_a_path_without_a_model_does_not_stop_the_others(here: Path, run) -> None:
    outcome = run("lost.onnx", "a", *V)
    assert (outcome.code, "error: lost.onnx: no such" in outcome.err) == (2, True)
    assert read_tokens(Path("a")) == {True}
    assert run("lost.onnx", *V).code == 2
    outcome = run("lost.onnx", "a", *V, "-d", "new")  # the layout depends on all paths
    assert (outcome.code, Path("new").exists()) == (2, False)


def test_windows_stay_a_set_though_nothing_checks_them(here: Path, run) -> None:
    assert run("c", *V, "--no-set").code == 2
    assert read_tokens(Path("c")) == {False}


def test_models_of_one_sidecar_change_together(here: Path, run) -> None:
    folder = genai_folders.build_folder(here / "genai", model=models.decoder())
    saved(models.decoder(), folder / "other.onnx")
    (folder / "other.onnx").write_bytes(b"no model")
    (here / "alone").mkdir()
    saved(models.decoder(), here / "alone" / "m.onnx")
    assert run(folder, "alone", *V).code == 2
    assert read_tokens(here / "alone") == {True}
    assert read_tokens(folder) == {False}


def test_a_set_that_cannot_be_written_does_not_stop_the_next(here: Path, run) -> None:
    link = Path("a/layer_0_1/Tiny_layer_tmp_0_1.onnx")
    link.rename("real.onnx")
    link.symlink_to(here / "real.onnx")  # refused without --force
    write_windows(Path("d"), 2)
    assert run("a", "d", *V).code == 2
    assert [read_tokens(Path(name)) for name in "ad"] == [{False}, {True}]


def test_two_results_in_one_place_are_not_both_written(here: Path, run) -> None:
    saved(models.decoder(), here / "m.onnx")
    saved(models.decoder(), here / "n.onnx")
    (here / "out").mkdir()
    (here / "out" / "n.onnx").symlink_to("m.onnx")
    outcome = run("m.onnx", "n.onnx", *V, "-d", "out", "--force")
    assert outcome.code == 2
    assert not list(here.rglob(".onnxkvrename*"))


def test_json_says_what_became_of_each(here: Path, run) -> None:
    document = json.loads(run(".", *V, "--format", "json").out)
    assert document["summary"] == {"renamed": 3, "unchanged": 0, "would-rename": 3, "failed": 2}
    assert document["exit_code"] == 2


def test_an_export_cache_is_planned_as_a_whole(here: Path, run) -> None:
    outcome = run("a", *V, "--seed-cache")
    assert (
        outcome.code,
        "--keep-going and --seed-cache" in outcome.err,
    ) == (
        2,
        True,
    )


def test_python_does_the_same(here: Path) -> None:
    report = rename_all(["a", "b"], "VLLM", keep_going=True)
    assert report.failed
    assert [read_tokens(Path(name)) for name in "ab"] == [{True}, {False}]
    assert report.sets == ((0, 1, 2), (3, 4))


def test_models_that_share_external_data_are_one_set(tmp_path: Path) -> None:
    from onnxkvrename.rules.kv_model import read_kv_model

    paths = []
    for name in ("m", "n", "o"):
        model = models.decoder()
        weights = onnx.TensorProto(name="w", dims=[999], data_type=onnx.TensorProto.UINT8)
        weights.raw_data = bytes(999)
        model.graph.initializer.append(weights)
        path = tmp_path / f"{name}.onnx"
        location = "o.data" if name == "o" else "shared.data"
        (tmp_path / location).unlink(missing_ok=True)
        onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
        paths.append(path)
    rules = load_rules()
    read = [read_kv_model(path, rules) for path in paths]
    assert group_models(paths, read, rules) == ((0, 1), (2,))
    assert rename(paths[2], "VLLM").status == "renamed"


def test_windows_that_overlap_are_a_finding_for_a_target_too(here: Path, run) -> None:
    saved(build_window(0, 1), Path("a/layer_1_2/Tiny_layer_tmp_1_2.onnx"))
    outcome = run("a", "--target", "vllm-qaic", "--check")
    assert outcome.code == 1
    assert "error KV304" in outcome.err


@pytest.mark.parametrize(
    "last",
    ["layer_2_3/Tiny_layer_tmp_2_3.onnx", "layer_2_3/Tyni_layer_tmp_2_3.onnx", "layer_2_3", "lost"],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_window_that_is_not_there_yet_keeps_the_others(
    last: str, exists: bool, here: Path, run, snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("a")
    Path("layer_2_3/Tiny_layer_tmp_2_3.onnx").unlink()
    if not exists:
        Path("layer_2_3").rmdir()
    elif last == "lost":
        Path("lost").mkdir()
    before = snapshot(here)
    outcome = run("layer_0_1", "layer_1_2", last, *V)
    assert outcome.code == 2
    assert "0 renamed, 0 unchanged, 1 failed, 2 left" in outcome.err
    assert snapshot(here) == before


def test_a_lost_path_with_one_result_file_is_refused(here: Path, run) -> None:
    saved(models.decoder(), here / "m.onnx")
    assert run("elsewhere/lost.onnx", "m.onnx", *V, "-o", "z.onnx").code == 2
    assert not Path("z.onnx").exists()


def write_sides(path: Path, inputs: list[str], outputs: list[str]) -> None:
    """Write a model with these inputs and outputs of buffers beside ``x`` and ``y``."""
    shape = ("batch_size", 2, "seq_len", 8)
    graph = onnx.helper.make_graph(
        [models.node("Identity", ["x"], [output]) for output in (*outputs, "y")],
        "main",
        [models.info(value, *shape) for value in ("x", *inputs)],
        [models.info(value, *shape) for value in (*outputs, "y")],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    path.parent.mkdir(parents=True, exist_ok=True)
    saved(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def link_elsewhere(path: Path, other_name: Path) -> None:
    """Give a model a second name, so that a rename is refused without ``--force``."""
    other_name.hardlink_to(path)


def write_cross_models(folder: Path) -> None:
    """Write an encoder and the decoder whose cross buffers it makes, in two folders."""
    write_sides(folder / "enc" / "model.onnx", [], ["present_key_cross_0"])
    write_sides(folder / "dec" / "model.onnx", ["past_key_cross_0"], [])


@pytest.mark.parametrize("failing", ["enc", "dec"])
@pytest.mark.parametrize("is_readable", [True, False])
def test_an_encoder_and_its_decoder_in_two_folders_change_together(
    failing: str, is_readable: bool, tmp_path: Path, run, snapshot
) -> None:
    write_cross_models(tmp_path / "one")
    write_cross_models(tmp_path / "two")
    path = tmp_path / "one" / failing / "model.onnx"
    if is_readable:
        link_elsewhere(path, tmp_path / "other name")
    else:
        path.write_bytes(b"no model")
    before = snapshot(tmp_path / "one")
    assert run(tmp_path, *V, "--profile", "ort-encdec").code == 2
    assert snapshot(tmp_path / "one") == before
    assert read_tokens(tmp_path / "two") == {True}


@pytest.mark.parametrize("failing", ["decoder_model", "decoder_with_past_model"])
def test_a_first_decoder_and_that_of_later_steps_change_together(
    failing: str, tmp_path: Path, run, snapshot
) -> None:
    """As Optimum writes them: the first one only makes the cache that the other one keeps."""
    past, present = "past_key_values.0.key", "present.0.key"
    for name in ("one", "two"):
        write_sides(tmp_path / name / "decoder_model.onnx", [], [present])
        write_sides(tmp_path / name / "decoder_with_past_model.onnx", [past], [present])
    link_elsewhere(tmp_path / "one" / f"{failing}.onnx", tmp_path / "other name")
    before = snapshot(tmp_path / "one")
    assert run(tmp_path, *V, "--profile", "huggingface").code == 2
    assert snapshot(tmp_path / "one") == before
    assert read_tokens(tmp_path / "two") == {True}


def test_what_cannot_be_read_belongs_to_its_folder(here: Path, run) -> None:
    for name in ("exports/one", "exports/two"):
        Path(name).mkdir(parents=True)
        saved(models.decoder(), here / name / "decoder_with_past_model.onnx")
    Path("exports/one/decoder_model.onnx").write_bytes(b"no model")
    assert run("exports", *V).code == 2
    assert read_tokens(Path("exports/one")) == {False}
    assert read_tokens(Path("exports/two")) == {True}


@pytest.mark.parametrize("paths", [["."], ["one", "two", "two/loop.onnx"], ["one", "two/ring/m"]])
def test_links_in_a_circle_hold_back_the_models_of_their_folder_only(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        Path(name).mkdir()
        saved(models.decoder(), Path(name, "decoder.onnx"))
    Path("two/loop.onnx").symlink_to("loop.onnx")
    Path("two/ring").symlink_to("ring")
    outcome = run(*paths, *V)
    assert (outcome.code, "Too many levels" in outcome.err) == (2, True)
    assert read_tokens(Path("one")) == {True}
    assert b"_VLLM" not in Path("two/decoder.onnx").read_bytes()
    outcome = run(*paths, "--prefix", "OTHER", "--replace")
    assert (outcome.code, b"_OTHER" in Path("one/decoder.onnx").read_bytes()) == (2, False)


def test_a_set_that_no_consumer_can_take_does_not_stop_the_others(here: Path, run) -> None:
    model = build_window(0, 1)
    model.graph.input.append(models.info("other/past_key.0", 1, 2, 4, 8))
    model.graph.output.append(models.info("other/past_key.0_RetainedState", 1, 2, 4, 8))
    name = model.graph.input[-1].name
    model.graph.node.append(models.node("Neg", [name], [f"{name}_RetainedState"]))
    (here / "twice").mkdir()
    saved(model, here / "twice/m.onnx")
    outcome = run("a", "twice", "-k", "--target", "vllm-qaic")
    assert outcome.code == 2
    assert "error: twice/m.onnx: has two" in outcome.err
    assert read_tokens(Path("a"), b"_vllmKvCache") == {True}
    assert read_tokens(Path("twice"), b"_vllmKvCache") == {False}


def test_the_profile_is_picked_by_the_models_that_can_be_read(here: Path, run) -> None:
    for name in ("exports/b", "exports/c"):
        Path(name).mkdir(parents=True)
    saved(genai_folders.build_decoder([0]), here / "exports/b/m.onnx")  # Optimum's names
    (here / "exports/c/bad.onnx").write_bytes(b"no model")
    assert run("exports", *V, "-d", "new").code == 2
    assert read_tokens(Path("new")) == {True}
    outcome = run("exports", *V)
    assert outcome.code == 2
    assert "exports/b/m.onnx: 4 names changed" in outcome.err
    assert "1 renamed, 0 unchanged, 1 failed" in outcome.err.splitlines()[-1]


def test_a_result_elsewhere_counts_as_written(here: Path, run) -> None:
    for name in ("in/a", "in/b"):
        Path(name).mkdir(parents=True)
    saved(build_window(0, 1, "VLLM"), here / "in/a/m.onnx")
    Path("in/b/m.onnx").write_bytes(b"no model")
    outcome = run("in", *V, "-d", "out")
    assert Path("out/a/m.onnx").exists()
    assert (outcome.code, "nothing was written" in outcome.err) == (2, False)
    assert "nothing was written" in run("in/b", "b", *V).err


def test_pairs_of_the_dataflow_are_those_of_the_models_that_can_be_read(here: Path, run) -> None:
    shapes = [("batch_size", HEADS, length, HEAD) for length in ("past", "total")]
    cache = Cache("past_key_values.0.key", "present.0.key", *shapes)
    for name in ("exports/good", "exports/bad"):
        Path(name).mkdir(parents=True)
    saved(build_model([cache]), here / "exports/good/m.onnx")
    Path("exports/bad/m.onnx").write_bytes(b"no model")
    assert run("exports", *V, "--pairs", "dataflow").code == 2
    assert read_tokens(Path("exports")) == {True, False}
    only_bad = run("exports/bad", *V, "--pairs", "dataflow")
    assert "error: exports/bad/m.onnx: " in only_bad.err


def test_python_reports_a_path_without_a_model(here: Path) -> None:
    report = rename_all(["lost.onnx", "a"], "VLLM", keep_going=True)
    assert [model.path for model in report.models if model.error] == ["lost.onnx"]
    assert read_tokens(Path("a")) == {True}
    with pytest.raises(ModelError, match="no such file"):
        rename_all(["lost.onnx", "a"], "VLLM", keep_going=True, directory="new")


def test_an_interrupt_says_how_many_models_are_done(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_windows(Path("d"), 2)
    write, calls = BatchWriter.write, list[BatchWriter]()

    def write_first(self: BatchWriter) -> None:
        calls.append(self)
        if len(calls) > 1:
            raise KeyboardInterrupt
        write(self)

    monkeypatch.setattr(BatchWriter, "write", write_first)
    outcome = run("a", "d", *V)
    assert outcome.code == 130
    assert "3 of 5" in outcome.err
    assert [read_tokens(Path(name)) for name in "ad"] == [{True}, {False}]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("d", "broken.onnx", "-k"), "2 of 3"),
        (("d",), "all results"),
        (("d", "-d", "new"), "all results"),
    ],
)
def test_an_interrupt_after_the_last_file_is_in_place_counts_it(
    args: tuple[str, ...], expected: str, here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_windows(Path("d"), 2)
    Path("broken.onnx").write_bytes(b"no model")
    real = os.unlink

    def interrupt(path: Path, **how: int | None) -> None:
        if read_tokens(Path("new" if "-d" in args else "d")) == {True}:
            monkeypatch.setattr(os, "unlink", real)
            raise KeyboardInterrupt
        real(path, **how)

    monkeypatch.setattr(os, "unlink", interrupt)
    outcome = run(*args, "--prefix", "VLLM")
    assert outcome.code == 130
    text = outcome.err.strip()
    assert "interrupted" in text
    assert f"{expected}" in text
    assert not list(Path().rglob(".onnxkvrename-*"))


def test_an_interrupt_while_the_answer_is_printed_says_what_is_in_place(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxkvrename.cli.rename.print_answer", interrupt)
    assert "all results" in run("a", "--prefix", "VLLM").err
    assert "half written (run" in run("a", "--prefix", "VLLM").err  # there was nothing to do
    assert "half written (run" in run("a", "--prefix", "ABC", "--replace", "--dry-run").err


def test_an_interrupt_while_workers_end_says_what_is_in_place(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def open_and_interrupt(*args: object) -> Iterator[None]:
        yield None
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxkvrename.cli.rename.open_executor", open_and_interrupt)
    assert "all results" in run("a", "--prefix", "VLLM").err


@needs_fork
@pytest.mark.parametrize("name", ["replace", "unlink"])
def test_after_a_kill_the_next_run_removes_what_is_left_though_a_set_still_fails(
    name: str, here: Path
) -> None:
    shutil.rmtree("b")
    assert main([".", *V]) == 2
    done = read_directory(here)
    killed = half_done = 0
    for nth in count(1):
        shutil.rmtree("a")
        write_windows(Path("a"), 3)
        if not run_and_kill(name, nth, ".", *V, after=False, code=2):
            break
        killed += 1
        half_done += main(["recover", "."]) == 1
        assert main([".", *V]) == 2
        assert read_directory(here) == done, (name, nth)
    assert killed > 1
    assert half_done or name != "replace"


def refuse_to_list(monkeypatch: pytest.MonkeyPatch, *refused: str) -> None:
    """Let the system list no directory of these, whoever asks."""
    real = os.scandir

    def scandir(path: str | Path) -> object:
        if any(os.path.abspath(path) == os.path.abspath(name) for name in refused):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)


@pytest.mark.parametrize(
    ("unlisted", "renamed"),
    [
        ("a/other", {"d", "e", "top"}),  # it may be a window of a
        ("a/other/below", {"a", "d", "e", "top"}),  # windows are not so deep
        ("top/x/y", {"a", "d", "e"}),  # the merged file may be made of windows in it
        ("e/x", {"a", "d", "e", "top"}),  # a model alone needs nothing below it
        ("x", {"a", "d", "e", "top"}),
    ],
)
def test_a_directory_that_cannot_be_listed_holds_back_what_it_may_belong_to(
    unlisted: str, renamed: set[str], here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree("b")
    shutil.rmtree("c")
    for name in ("d/m.onnx", "e/m.onnx", "top/merged_0-3.onnx"):
        Path(name).parent.mkdir()
        saved(build_window(0, 3), Path(name))
    Path(unlisted).mkdir(parents=True, exist_ok=True)
    refuse_to_list(monkeypatch, unlisted)
    assert run(".", "--prefix", "VLLM").code == 2
    outcome = run(".", *V)
    assert outcome.code == 2
    assert f"error: {unlisted}: cannot be listed" in outcome.err
    assert {name for name in ("a", "d", "e", "top") if read_tokens(Path(name)) == {True}} == renamed


def test_a_directory_that_cannot_be_listed_is_reported_once_for_all_else(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(models.decoder(), here / "m.onnx")
    Path("b/only").mkdir(parents=True)
    refuse_to_list(monkeypatch, "b/only")
    for options in (("--profile", "auto"), ("--sidecars",), ("-d", "new"), ("--check",)):
        outcome = run("a", "b", *V, *options)
        assert outcome.code == 2, options
        assert outcome.err.count("b/only: cannot be listed") == 1, options
    assert read_tokens(Path("new/a")) == {True}
    report = rename_all(["a", "b"], "VLLM", keep_going=True)
    assert [model.path for model in report.models if model.error] == ["b/only"]
    assert run("b/only", *V).code == 2
    one = run("b", *V, "-o", "one.onnx")
    assert (one.code, "b/only: cannot be listed" in one.err) == (2, True)
