"""A set that was left half done, by a disk that refuses even the undo, or by a kill."""

from __future__ import annotations

import errno
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
from tiers import thin

from onnxkvrename.cli.main import main
from onnxkvrename.files.temp_file import TEMP_PREFIX, build_key, build_temp_name

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
    return (model, *RENAME)


def build_cache(root: Path) -> tuple[object, ...]:
    """Two exports of QEfficient's cache."""
    for name in ("Tiny", "Small"):
        made = qefficient_exports.write_export(root / name)
        target = root / "cache" / made.name.replace("Tiny", name)
        shutil.copytree(made, target)
        shutil.rmtree(root / name)
    return (root / "cache", *RENAME, "--seed-cache")


BUILDERS = [build_set, build_output, build_single, build_sidecar, build_cache]
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

    def list_new(self) -> list[str]:
        """Return the files that are new and were other ones before."""
        left = read_directory(self.root)
        return [name for name, data in self.before.items() if left.get(name) != data]

    def end(self, where: str) -> None:
        """Run the same command again, and check that nothing is left of the run."""
        assert self.run() == 0, where
        assert read_directory(self.root) == self.after, where


@pytest.fixture(params=BUILDERS, ids=lambda build: build.__name__)
def trial(request: pytest.FixtureRequest, tmp_path: Path) -> Trial:
    return Trial(request.param, tmp_path / "trial")


def refuse_from(nth: int, names: tuple[str, ...], patch: pytest.MonkeyPatch) -> Iterator[int]:
    """From the ``nth`` change of a name on, the disk refuses every one for good."""
    calls = count(1)

    def call(real: Callable[..., Any], *args: Any, **how: Any) -> Any:
        if next(calls) >= nth:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(*args, **how)

    for name in names:
        patch.setattr(os, name, partial(call, getattr(os, name)))
    return calls


@pytest.mark.parametrize(
    ("names", "trial"),
    thin(product(REFUSED, BUILDERS), 5),
    indirect=["trial"],
)
def test_a_disk_that_refuses_every_rename_from_some_point_on(
    names: tuple[str, ...], trial: Trial, monkeypatch: pytest.MonkeyPatch, capsys
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
            assert "undo failed" not in err, where
            continue_here = reached and nth < 60
            if continue_here:
                continue
            break
        mixed += 1
        assert code == 2, where
        assert "Read-only file system" in err, where
        assert "the others as they were" in err, where
        assert "to finish the work, run the same command again" in err, where
        for name in trial.list_new():
            assert name in err, where
        trial.end(where)
        if not reached:
            break
    assert mixed > 0


@needs_fork
def test_a_run_that_was_killed_is_completed_by_the_same_command(
    trial: Trial, request: pytest.FixtureRequest
) -> None:
    mixed, step = 0, 1 if request.config.getoption("--full") else 3
    for name in ("replace", "rename", "link"):
        for nth in count(1, step):
            trial.args = trial.start()
            killed = run_and_kill(name, nth, *trial.args, after=nth % 2 > 0)
            where = f"{name} {nth}"
            mixed += trial.judge(where)
            trial.end(where)
            if not killed:
                break
    assert mixed > 0


def build_reserved_names(root: Path) -> tuple[Path, Path]:
    """A model whose weights have a name as this program gives, and these."""
    proto = models.decoder()
    weight = proto.graph.initializer.add(name="w", dims=[4], data_type=2)
    weight.data_location = onnx.TensorProto.EXTERNAL
    data = root / build_temp_name(build_key(), "new")
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
    model = saved(models.decoder(), tmp_path / build_temp_name(build_key(), "new"))
    before = model.read_bytes()
    assert main([str(model), *RENAME, "-q", "-o", str(tmp_path / "o.onnx")]) == 0
    assert model.read_bytes() == before


def test_a_page_leaves_what_it_is_made_from(tmp_path: Path) -> None:
    output = tmp_path / "out.html"
    model = saved(models.decoder(), tmp_path / build_temp_name(build_key(), "new"))
    main(["inspect", str(model), "--html", str(output)])
    assert output.exists()
    assert model.exists()
