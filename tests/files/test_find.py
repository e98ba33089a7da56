from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from onnxkvrename import ModelError, WriteError
from onnxkvrename.files.find import find_jobs
from onnxkvrename.files.temp_file import TEMP_PREFIX


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some files, and the directory they are in as the working directory."""
    for name in ("layer_10/a.onnx", "layer_2/a.onnx", "b.onnx", "note.txt", "empty/x.onnx.data"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path / "tree")
    return tmp_path / "tree"


def found(*models: str, output: str | None = None, directory: str | None = None) -> list[str]:
    """``model`` or ``model -> output`` of each job."""
    places = [None if place is None else Path(place) for place in (output, directory)]
    return [
        str(job.model) if job.model == job.output else f"{job.model} -> {job.output}"
        for job in find_jobs([Path(model) for model in models], *places)
    ]


def test_a_directory_gives_its_models_in_natural_order(tree: Path) -> None:
    assert found(".") == ["b.onnx", "layer_2/a.onnx", "layer_10/a.onnx"]


def test_a_superscript_in_a_name_is_no_number(tree: Path) -> None:
    for name in ("1²2.onnx", "1².onnx", "2.onnx"):
        (tree / "layer_2" / name).touch()
    assert len(found("layer_2")) == 4


def test_files_come_in_the_order_given_whatever_they_are_called(tree: Path) -> None:
    assert found("note.txt", "layer_10", "b.onnx") == ["note.txt", "layer_10/a.onnx", "b.onnx"]


def test_each_model_is_taken_once(tree: Path) -> None:
    (tree / "link.onnx").symlink_to("b.onnx")
    assert found("b.onnx", "./b.onnx", str(tree / "b.onnx"), "layer_2/../b.onnx") == ["b.onnx"]
    assert found("link.onnx", "b.onnx") == ["b.onnx"]
    assert found("link.onnx") == ["link.onnx"]
    assert found(".").count("b.onnx") == 1


def test_linked_directories_are_not_entered(tree: Path) -> None:
    (tree / "loop").symlink_to(".")
    assert len(found(".")) == 3


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("c.onnx", r"c\.onnx: no such file$"),
        ("layer_2/b.onnx", r"layer_2/b\.onnx: no such file$"),
        ("layer_2/aa.onnx", r"did you mean layer_2/a\.onnx\?"),
        ("elsewhere", r"elsewhere: no such file$"),
        ("nowhere/b.onnx", "directory nowhere"),
        ("empty", "empty: has no"),
    ],
)
def test_a_path_that_leads_to_no_model_is_named(path: str, said: str, tree: Path) -> None:
    with pytest.raises(ModelError, match=said):
        find_jobs([Path(path)])


def test_a_directory_that_cannot_be_listed_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("layer_2"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ModelError, match="layer_2: cannot be listed"):
        find_jobs([tree])


def test_an_output_is_for_one_model(tree: Path) -> None:
    assert found("b.onnx", output="new.onnx") == ["b.onnx -> new.onnx"]
    assert found("b.onnx", "./b.onnx", output="new.onnx") == ["b.onnx -> new.onnx"]
    with pytest.raises(WriteError, match=r"new\.onnx: .* 2 models"):
        found("b.onnx", "layer_2", output="new.onnx")


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["b.onnx"], ["b.onnx -> out/b.onnx"]),
        (["layer_2/a.onnx"], ["layer_2/a.onnx -> out/a.onnx"]),
        (["layer_2"], ["layer_2/a.onnx -> out/a.onnx"]),
        (
            ["layer_2/a.onnx", "layer_10/a.onnx"],
            ["layer_2/a.onnx -> out/layer_2/a.onnx", "layer_10/a.onnx -> out/layer_10/a.onnx"],
        ),
        (
            ["layer_2", "b.onnx"],
            ["layer_2/a.onnx -> out/layer_2/a.onnx", "b.onnx -> out/b.onnx"],
        ),
        (["../tree/layer_2/../b.onnx"], ["../tree/layer_2/../b.onnx -> out/b.onnx"]),
    ],
)
def test_below_another_directory_models_lie_as_below_their_common_parent(
    models: list[str], expected: list[str], tree: Path
) -> None:
    assert found(*models, directory="out") == expected


@pytest.mark.parametrize(
    "where",
    [
        lambda: found("b.onnx", output="./b.onnx"),
        lambda: found(".", directory="."),
        lambda: found("layer_2", directory="alias"),
    ],
)
def test_a_result_may_not_be_sent_onto_its_model(where: Callable[[], object], tree: Path) -> None:
    (tree / "alias").symlink_to("layer_2")
    with pytest.raises(WriteError, match="the model itself"):
        where()


def test_nothing_given_is_nothing_found() -> None:
    assert find_jobs([]) == ()


def test_what_a_dead_run_has_left_of_a_new_directory_holds_no_models(tree: Path) -> None:
    stage = tree / "layer_2" / f"{TEMP_PREFIX}of-another-version"
    stage.mkdir()
    (stage / "a.onnx").touch()
    assert found(".") == ["b.onnx", "layer_2/a.onnx", "layer_10/a.onnx"]
    assert found("layer_2") == ["layer_2/a.onnx"]


class FailingQuery:
    """A query of the disk that fails the Nth time, for a path with this end."""

    def __init__(self, name: str, end: str, nth: int, number: int) -> None:
        self.real, self.end, self.nth, self.number = getattr(os, name), end, nth, number
        self.count = 0

    def __call__(self, path: object, *args: object, **how: object) -> object:
        if str(path).endswith(self.end):
            self.count += 1
            if self.count == self.nth:
                raise OSError(self.number, os.strerror(self.number))
        return self.real(path, *args, **how)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["stat", "lstat", "scandir"])
@pytest.mark.parametrize("end", ["layer_2", "layer_10", "a.onnx", "tree", "out"])
def test_a_query_that_fails_splits_no_set(
    end: str, name: str, number: int, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is taken for none moves the common parent, and so some of the results."""

    def find_or_fail() -> str:
        try:
            return " ".join(found("layer_2", "layer_10", directory="out"))
        except ModelError as error:
            return error.message

    (tree / "out").mkdir()
    expected = "layer_2/a.onnx -> out/layer_2/a.onnx layer_10/a.onnx -> out/layer_10/a.onnx"
    for nth in count(1):
        query = FailingQuery(name, end, nth, number)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, query)
            outcome = find_or_fail()
        if query.count < nth:
            assert outcome == expected
            break
        assert outcome.startswith("cannot be ")
        assert outcome.endswith(os.strerror(number))


def test_each_path_is_asked_for_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: the cost does not grow with models times paths."""
    paths = [tree / f"{number}.onnx" for number in range(40)]
    for path in paths:
        path.touch()

    def count_queries(number: int) -> int:
        queries = [FailingQuery(name, "", 0, 0) for name in ("stat", "lstat")]
        with monkeypatch.context() as patch:
            for query, name in zip(queries, ("stat", "lstat"), strict=True):
                patch.setattr(os, name, query)
            find_jobs(paths[:number], None, Path("out"))
        assert queries[0].count <= number + 1
        return sum(query.count for query in queries)

    small, large = count_queries(20), count_queries(40)
    assert large <= 2 * small


def test_a_linked_directory_that_is_called_like_a_model_is_none(tree: Path) -> None:
    (tree / "loop.onnx").symlink_to("layer_2")
    (tree / "nowhere.onnx").symlink_to("nothing")
    assert found(".") == ["b.onnx", "layer_2/a.onnx", "layer_10/a.onnx", "nowhere.onnx"]


def test_results_of_an_earlier_run_are_no_models_however_they_are_called(tree: Path) -> None:
    (tree / "out").mkdir()
    (tree / "out" / "b.onnx").touch()
    (tree / "alias").symlink_to(tree)
    assert len(found(".", directory="out")) == len(found(".", directory="alias/out")) == 3
