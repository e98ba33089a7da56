"""A set that was left half done, by a disk that refuses even the undo, or by a kill."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import models
import onnx
import pytest
import qefficient_exports
from custom_io_files import write_custom_io
from kill_commands import needs_fork, read_directory, run_and_kill
from models import saved
from schemas import load_schema, validate
from tiers import thin

from onnxkvrename.cli.main import main
from onnxkvrename.storage.record import build_record_path
from onnxkvrename.storage.temp_file import (
    LOCK_NAME,
    TEMP_PREFIX,
    build_file_key,
    build_key,
    build_temp_name,
)

RENAME = ("--prefix", "VLLM")


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, and here only the order of calls matters."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def build_set(root: Path) -> tuple[object, ...]:
    """Three models in two directories, in place."""
    for name in ("in/a.onnx", "in/b.onnx", "in/sub/c.onnx"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        saved(models.decoder(), root / name)
    return (root / "in", *RENAME)


def build_output(root: Path) -> tuple[object, ...]:
    """A directory with results of before and new ones, a data file, and a new directory."""
    build_set(root)
    proto = models.decoder()
    weight = proto.graph.initializer.add(name="w", dims=[4], data_type=2)
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    saved(proto, root / "in" / "a.onnx")
    (root / "in" / "w.bin").write_bytes(b"data")
    (root / "out").mkdir()
    for name in ("a.onnx", "w.bin"):
        (root / "out" / name).write_bytes(b"of before")
    return (root / "in", *RENAME, "-d", root / "out", "--force")


def build_single(root: Path) -> tuple[object, ...]:
    """One model that replaces an older result, with its data."""
    build_output(root)
    return (root / "in" / "a.onnx", *RENAME, "-o", root / "out" / "a.onnx", "--force")


def build_sidecar(root: Path) -> tuple[object, ...]:
    """A model and a text file that repeats its names."""
    model = saved(models.decoder(), root / "a.onnx")
    write_custom_io(root / "custom_io.yaml", model, "float16")
    return (model, *RENAME, "--sidecars", "require")


def build_cache(root: Path) -> tuple[object, ...]:
    """Two exports of QEfficient's cache."""
    for name in ("Tiny", "Small"):
        made = qefficient_exports.write_export(root / name)
        target = root / "cache" / made.name.replace("Tiny", name)
        shutil.copytree(made, target)
        shutil.rmtree(root / name)
    return (root / "cache", *RENAME, "--seed-cache")


BUILDERS = [build_set, build_output, build_single, build_sidecar, build_cache]
WAYS = ["--undo", "--finish", "again"]
REFUSED = [("replace", "rename"), ("replace", "rename", "unlink")]


class Trial:
    """A command whose run is stopped, with the files before and after it."""

    def __init__(self, build: Callable[[Path], tuple[object, ...]], root: Path) -> None:
        self.build, self.root = build, root
        self.args = self.start()
        self.before = read_directory(root)
        assert self.run() == 0
        self.after = read_directory(root)

    def start(self) -> tuple[object, ...]:
        """Make the files as they are before the run."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        return self.build(self.root)

    def run(self) -> int:
        return main([*map(str, self.args), "-q"])

    def judge(self, where: str) -> bool:
        """Check that each file is complete, old or new; return whether the set is mixed."""
        left = read_directory(self.root)
        own = {name: data for name, data in left.items() if TEMP_PREFIX not in name}
        for name, data in own.items():
            # A directory of the cache may have its new name, or not yet.
            assert data in (self.before.get(name), self.after.get(name)) or (
                self.build is build_cache and data in (*self.before.values(), *self.after.values())
            ), (where, name)
        return own not in (self.before, self.after)

    def end(self, where: str, way: str) -> None:
        """End the run in one of three ways, and check that nothing is left of it."""
        if way == "again":
            assert self.run() == 0, where
        else:
            assert main(["recover", str(self.root), way]) == 0, where
        expected = self.before if way == "--undo" else self.after
        assert read_directory(self.root) == expected, where
        assert main(["recover", str(self.root)]) == 0, where


@pytest.fixture(params=BUILDERS, ids=lambda build: build.__name__)
def trial(request: pytest.FixtureRequest, tmp_path: Path) -> Trial:
    return Trial(request.param, tmp_path / "trial")


def refuse_from(nth: int, names: tuple[str, ...], patch: pytest.MonkeyPatch) -> Iterator[int]:
    """From the ``nth`` change of a name on, the disk refuses every one for good."""
    calls = count(1)

    def call(real: Callable[..., Any], *args: Any, **how: Any) -> Any:
        is_placing = not any(str(path).endswith("-record") for path in args)
        if is_placing and next(calls) >= nth:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(*args, **how)

    for name in names:
        patch.setattr(os, name, partial(call, getattr(os, name)))
    return calls


@pytest.mark.parametrize(
    ("names", "way", "trial"),
    thin(product(REFUSED, WAYS, BUILDERS[:-1]), 7),
    indirect=["trial"],
)
def test_a_disk_that_refuses_every_rename_from_some_point_on(
    way: str, names: tuple[str, ...], trial: Trial, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    mixed = 0
    for nth in count(1):
        trial.args = trial.start()
        with monkeypatch.context() as patch:
            calls = refuse_from(nth, names, patch)
            capsys.readouterr()
            code, err = trial.run(), capsys.readouterr().err
            reached = next(calls) > nth
        where = f"{trial.build.__name__} {names} {nth}: {err}"
        assert (code == 2) or not reached or "unlink" in names, where
        if not trial.judge(where):
            assert "stay new" not in err, where
            continue_here = reached and nth < 60
            if continue_here:
                continue
            break
        mixed += 1
        assert code == 2, where
        assert "Read-only file system" in err, where
        assert "as they were; all old and new files are kept" in err, where
        assert "onnxkvrename recover " in err, where
        assert main(["recover", str(trial.root)]) == 1
        out = capsys.readouterr().out
        assert ": new" in out, where
        assert ": old (the new one is .onnxkvrename-" in out or trial.build is build_cache, where
        trial.end(where, way)
        if not reached:
            break
    assert mixed > 0


@pytest.fixture
def half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with three models, of which only some are renamed."""
    trial = Trial(build_set, tmp_path / "trial")
    for nth in count(1):
        trial.args = trial.start()
        with monkeypatch.context() as patch:
            refuse_from(nth, ("replace", "rename"), patch)
            trial.run()
        if trial.judge(str(nth)):
            return trial.root
    raise AssertionError


def read_answer(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """The JSON document of ``recover``, and nothing else is said."""
    capsys.readouterr()
    code = main(["recover", *map(str, args), "--format", "json"])
    out, err = capsys.readouterr()
    document: dict[str, Any] = json.loads(out)
    validate(document, load_schema("recover-1"))
    assert document["exit_code"] == code
    assert err == "" or code == 2
    return document


def test_json_says_which_files_are_new_and_where_the_others_are_kept(
    half_done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_answer(capsys, half_done)
    assert (found["action"], found["exit_code"], found["skipped"]) == ("list", 1, [])
    (run,) = found["runs"]
    assert Path(run["record"]).exists()
    assert {target["state"] for target in run["targets"]} == {"new", "old"}
    replaced = {
        Path(target["path"]): Path(target["kept"]).read_bytes()
        for target in run["targets"]
        if target["state"] == "new"
    }
    for path, old in replaced.items():
        assert path.read_bytes() != old

    undone = read_answer(capsys, half_done, "--undo")
    assert (undone["action"], undone["exit_code"]) == ("undo", 0)
    assert undone["runs"] == found["runs"]  # as they were found
    assert {path: path.read_bytes() for path in replaced} == replaced
    nothing = read_answer(capsys, half_done)
    assert (nothing["runs"], nothing["exit_code"]) == ([], 0)


def test_json_after_the_new_files_were_put_in_place(
    half_done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = read_answer(capsys, half_done)["runs"]
    old = [target for target in run["targets"] if target["state"] == "old"]
    expected = {target["path"]: Path(target["kept"]).read_bytes() for target in old}
    assert read_answer(capsys, half_done, "--finish")["action"] == "finish"
    assert {path: Path(path).read_bytes() for path in expected} == expected


def test_json_of_a_record_that_is_skipped_and_of_a_path_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = build_record_path(tmp_path, "0" * 24)
    planted.write_text("{")
    skipped = read_answer(capsys, tmp_path)
    assert skipped["exit_code"] == 1
    assert [fault["path"] for fault in skipped["skipped"]] == [str(planted)]
    missing = read_answer(capsys, tmp_path / "missing")
    assert (missing["exit_code"], missing["action"]) == (2, None)
    assert missing["error"]["path"] == str(tmp_path / "missing")


def test_every_file_of_a_half_done_run_is_annotated_for_github(
    half_done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(read_answer(capsys, half_done)["runs"][0]["targets"])
    assert main(["recover", str(half_done), "--format", "github"]) == 1
    assert capsys.readouterr().out.count("::error file=") == count
    assert main(["recover", str(half_done), "--format", "github", "--undo"]) == 0
    assert capsys.readouterr().out.count("::notice file=") == count


@needs_fork
@pytest.mark.parametrize(("way", "trial"), thin(product(WAYS, BUILDERS), 5), indirect=["trial"])
def test_a_run_that_was_killed_is_ended_either_way(
    way: str, trial: Trial, request: pytest.FixtureRequest
) -> None:
    mixed, step = 0, 1 if request.config.getoption("--full") else 3
    for name in ("replace", "rename", "link"):
        for nth in count(1, step):
            trial.args = trial.start()
            killed = run_and_kill(name, nth, *trial.args, after=nth % 2 > 0)
            where = f"{name} {nth}"
            if trial.judge(where) and main(["recover", str(trial.root)]) == 1:
                mixed += 1
                trial.end(where, way)
            elif trial.build is not build_cache:
                assert trial.run() == 0, where
                assert read_directory(trial.root) == trial.after, where
            if not killed:
                break
    assert mixed > 0


@pytest.mark.parametrize("way", [(), ("--undo",), ("--finish",)])
def test_a_record_that_is_not_to_be_trusted_is_told_and_the_others_are_ended(
    way: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = build_record_path(tmp_path, "0" * 24)
    planted.write_text('{"files": [{"target": "/\\ud800"}]}')
    assert main(["recover", str(tmp_path), *way]) == 1
    assert f"{planted}: skipped: is not a record of a run" in capsys.readouterr().err
    assert planted.exists()


def test_a_rename_ignores_records_that_are_not_to_be_trusted(tmp_path: Path) -> None:
    model = saved(models.decoder(), tmp_path / "m.onnx")
    for number, text in enumerate(["{", '{"files": [{"target": "/\\ud800"}]}', "[" * 9999, "\0"]):
        build_record_path(tmp_path, f"{number:024}").write_text(text)
    assert main([str(model), *RENAME, "-q"]) == 0
    assert os.listdir(tmp_path) == ["m.onnx"]


def build_reserved_names(root: Path) -> tuple[Path, Path]:
    """A model whose weights have a name as this program gives, and these."""
    proto = models.decoder()
    weight = proto.graph.initializer.add(name="w", dims=[4], data_type=2)
    weight.data_location = onnx.TensorProto.EXTERNAL
    data = root / build_temp_name(build_key(), build_file_key(), "new")
    weight.external_data.add(key="location", value=data.name)
    data.write_bytes(b"data")
    return saved(proto, root / "m.onnx"), data


@pytest.mark.parametrize("options", [(), ("-n",)])
def test_weights_that_are_named_like_ours_are_read_and_stay(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    model, data = build_reserved_names(tmp_path)
    assert main([str(model), *RENAME, "-q", *options]) == 0
    assert data.read_bytes() == b"data"


def test_a_model_that_is_named_like_ours_is_read_and_stays(tmp_path: Path) -> None:
    model = saved(
        models.decoder(), tmp_path / build_temp_name(build_key(), build_file_key(), "new")
    )
    before = model.read_bytes()
    assert main([str(model), *RENAME, "-q", "-o", str(tmp_path / "o.onnx")]) == 0
    assert model.read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [["inspect", "--html"], ["manifest", "-o"]],
)
def test_other_commands_that_write_leave_what_they_read(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.html"
    model = saved(
        models.decoder(), tmp_path / build_temp_name(build_key(), build_file_key(), "new")
    )
    main([command[0], str(model), *command[1:], str(output)])
    assert output.exists()
    assert model.exists()


# What is said of a run that stopped halfway.


def build_many(root: Path) -> tuple[object, ...]:
    """Twelve models in two directories, in place."""
    for number in range(12):
        path = root / "in" / f"half{number % 2}" / f"m{number}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        saved(models.decoder(), path)
    return (root / "in", *RENAME)


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: six of its twelve models are renamed, then the disk fails."""
    monkeypatch.chdir(tmp_path)
    args = build_many(tmp_path)
    with monkeypatch.context() as patch:
        refuse_from(7, ("replace", "rename"), patch)
        assert main([*map(str, args), "-q"]) == 2
    return tmp_path


def test_many_files_in_the_same_state_are_one_line(many: Path, run) -> None:
    listed = run("recover", "in")
    assert listed.out.splitlines() == [
        "6 files in in/half0 (first: m0.onnx): new (the old ones are beside them; "
        "--format json has their names)",
        "6 files in in/half1 (first: m1.onnx): old (the new ones are beside them; "
        "--format json has their names)",
    ]
    assert listed.err.splitlines() == [
        "a rename of 12 files stopped halfway: 6 new, 6 old",
        "onnxkvrename recover in --undo restores the old files",
        "onnxkvrename recover in --finish puts the new files in place",
    ]


@pytest.mark.parametrize(
    ("way", "new", "old"),
    [
        ("--undo", "restored", "still old"),
        ("--finish", "already new", "replaced by the new file"),
    ],
)
def test_after_the_end_of_a_run_each_line_says_what_was_done(
    way: str, new: str, old: str, many: Path, run
) -> None:
    assert run("recover", "in", way).out.splitlines() == [
        f"6 files in in/half0 (first: m0.onnx): {new}",
        f"6 files in in/half1 (first: m1.onnx): {old}",
    ]


@pytest.mark.parametrize(("way", "done"), [("--undo", "restored"), ("--finish", "put in place")])
def test_a_file_that_changed_since_the_run_stopped_may_leave_a_mix_and_the_line_says_so(
    way: str, done: str, half_done: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    monkeypatch.chdir(half_done)
    Path("in/b.onnx").write_bytes(b"another model")
    outcome = run("recover", ".", way)
    assert outcome.code == 1
    assert "in/b.onnx: changed since then; left as it is" in outcome.out.splitlines()
    assert outcome.err.splitlines() == [
        f"in/b.onnx changed since the run stopped, so it was not {done}; the files of the run may "
        "not fit together (`onnxkvrename verify in` checks them)"
    ]
    assert run("recover", ".").code == 0  # the run is ended all the same


def test_many_files_that_changed_since_the_run_stopped_are_counted(many: Path, run) -> None:
    for number in range(5):
        Path(f"in/half{number % 2}/m{number}.onnx").write_bytes(b"another model")
    outcome = run("recover", "in", "--undo", "--format", "github")
    assert outcome.code == 1
    assert outcome.out.count("::error file=") == 5
    assert (
        "5 files (first: in/half0/m0.onnx) changed since the run stopped, so they were not restored"
    ) in outcome.out


def test_files_are_named_as_they_were_typed(
    half_done: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    monkeypatch.chdir(half_done)
    for typed in ("in", "../trial/in"):
        paths = {line.partition(": ")[0] for line in run("recover", typed).out.splitlines()}
        assert paths == {f"{typed}/{name}" for name in ("a.onnx", "b.onnx", "sub/c.onnx")}
    annotated = run("recover", "in", "--format", "github").out
    assert "::error file=in/a.onnx,title=recover::" in annotated


@pytest.mark.parametrize("option", ["--check", "-n"])
def test_a_rename_that_writes_nothing_says_that_a_run_stopped_halfway(
    option: str, many: Path, run
) -> None:
    said = "a rename of 12 files stopped halfway: 6 new, 6 old (`onnxkvrename recover in` lists"
    assert said in run("in", *RENAME, option).err
    assert said in run("in", *RENAME, option, "--format", "github").out
    assert run("recover", "in", "--undo").code == 0
    assert "stopped halfway" not in run("in", *RENAME, option).err


@pytest.mark.parametrize(
    ("path", "others"),
    [("in/half0/m0.onnx", 5), ("in/half1/m1.onnx", 6), ("in", 0)],
    ids=["new", "old", "all"],
)
def test_a_rename_that_undoes_a_stopped_run_says_which_other_files_it_restored(
    path: str, others: int, many: Path, run
) -> None:
    said = f"a rename that had stopped halfway was undone first: {others} files in "
    outcome = run(path, *RENAME)
    assert outcome.code == 0
    assert (said in outcome.err) == bool(others)
    assert ("undone" in outcome.err) == bool(others)
    assert "undone" not in run("in", *RENAME).err


def test_a_rename_with_nothing_to_do_says_what_it_restored(many: Path, run) -> None:
    outcome = run("in", "--strip")
    assert outcome.code == 0
    assert "a rename that had stopped halfway was undone first: 6 files in " in outcome.err


# What other runs have left.


def test_a_path_that_does_not_exist_is_named(tmp_path: Path, run) -> None:
    outcome = run("recover", tmp_path / "none")
    assert (outcome.code, outcome.err) == (
        2,
        f"error: {tmp_path / 'none'}: no such file or directory\n",
    )


@pytest.mark.parametrize("way", [(), ("--undo",), ("--finish",)])
def test_a_directory_that_cannot_be_read_is_an_error(
    way: tuple[str, ...], tmp_path: Path, spawn
) -> None:
    """It may hold the record of a run, so the answer would not be complete."""
    (tmp_path / "parts").mkdir(mode=0)
    outcome = spawn("recover", tmp_path, *way)
    (tmp_path / "parts").chmod(0o755)
    assert (outcome.returncode, "parts: cannot be read" in outcome.stderr) == (2, True)


def test_locks_and_temporary_files_of_other_runs_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    """A run that ends removes its own, so these are of one that was killed, or is at work."""
    build_set(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("recover", ".").err == "no run to undo or to finish here\n"
    lock = tmp_path / "in" / LOCK_NAME
    lock.touch()
    assert "\n1 lock of runs that were killed" in run("recover", "in").err
    copy = tmp_path / "in" / "sub" / build_temp_name(build_key(), build_file_key(), "new")
    copy.write_bytes(b"half a copy")
    (tmp_path / "in" / f"{TEMP_PREFIX}of-someone-else").touch()
    outcome = run("recover", "in")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.splitlines() == [
        "no run to undo or to finish here",
        "1 lock and 1 temporary file of runs that were killed or are still running (first: "
        f"{lock.relative_to(tmp_path)}); the next rename that writes here removes those of "
        "killed runs",
    ]
    document = json.loads(run("recover", "in", "--format", "json").out)
    validate(document, load_schema("recover-1"))
    assert document["leftovers"] == [str(lock), str(copy)]
    assert run("in", *RENAME).code == 0  # as the line says
    assert run("recover", "in").err == "no run to undo or to finish here\n"
