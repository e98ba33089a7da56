"""Models are found where the user says, each once, and their results are laid out alike."""

from __future__ import annotations

import errno
import os
from itertools import count
from pathlib import Path

import pytest

from onnxkvrename import ModelError, WriteError
from onnxkvrename.files.find import find_jobs
from onnxkvrename.files.temp_file import TEMP_PREFIX


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some files, and the directory they are in as the working directory."""
    left = f"layer_2/{TEMP_PREFIX}of-another-version/a.onnx"  # of a killed run
    names = ("layer_10/a.onnx", "layer_2/a.onnx", "b.onnx", "note.txt", "empty/x.onnx.data", left)
    for name in names:
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


ALL = ["b.onnx", "layer_2/a.onnx", "layer_10/a.onnx"]


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([], []),
        (["."], ALL),
        (["layer_2"], ["layer_2/a.onnx"]),
        (["note.txt", "layer_10", "b.onnx"], ["note.txt", "layer_10/a.onnx", "b.onnx"]),
        (["b.onnx", "./b.onnx", "{tree}/b.onnx", "layer_2/../b.onnx"], ["b.onnx"]),
        (["../other/link.onnx", "b.onnx"], ["b.onnx"]),
        (["../other/link.onnx"], ["../other/link.onnx"]),
        (["../other"], [f"../other/{name}.onnx" for name in ("1²2", "1²", "link", "nowhere")]),
    ],
)
def test_each_model_is_taken_once_and_those_of_a_directory_in_natural_order(
    models: list[str], expected: list[str], tree: Path
) -> None:
    """Directories that are links are not entered, whatever they are called."""
    for name in ("loop", "loop.onnx"):
        (tree / name).symlink_to("layer_2")
    (tree.parent / "other").mkdir()
    for name in ("1²2.onnx", "1².onnx"):  # these are no numbers
        (tree.parent / "other" / name).touch()
    (tree.parent / "other" / "link.onnx").symlink_to(tree / "b.onnx")
    (tree.parent / "other" / "nowhere.onnx").symlink_to("nothing")
    assert found(*(model.format(tree=tree) for model in models)) == expected


@pytest.mark.parametrize(
    ("models", "place", "expected"),
    [
        (["b.onnx", "./b.onnx"], {"output": "new"}, ["b.onnx -> new"]),
        (["b.onnx"], {}, ["b.onnx -> out/b.onnx"]),
        (["layer_2/a.onnx"], {}, ["layer_2/a.onnx -> out/a.onnx"]),
        (["layer_2"], {}, ["layer_2/a.onnx -> out/a.onnx"]),
        (
            ["layer_2/a.onnx", "layer_10/a.onnx"],
            {},
            ["layer_2/a.onnx -> out/layer_2/a.onnx", "layer_10/a.onnx -> out/layer_10/a.onnx"],
        ),
        (
            ["layer_2", "b.onnx"],
            {},
            ["layer_2/a.onnx -> out/layer_2/a.onnx", "b.onnx -> out/b.onnx"],
        ),
        (["../tree/layer_2/../b.onnx"], {}, ["../tree/layer_2/../b.onnx -> out/b.onnx"]),
        # Results of an earlier run are no models.
        (["."], {"directory": "alias/out"}, [f"{name} -> alias/out/{name}" for name in ALL]),
        (["b.onnx", "layer_2"], {"output": "new"}, r"new: .* 2 models"),
        (["b.onnx"], {"output": "./b.onnx"}, "the model itself"),
        (["."], {"directory": "."}, "the model itself"),
        (["layer_2"], {"directory": "alias/layer_2"}, "the model itself"),
    ],
)
def test_results_lie_as_their_models_do_below_their_common_parent(
    models: list[str], place: dict[str, str], expected: list[str] | str, tree: Path
) -> None:
    (tree / "alias").symlink_to(tree)
    (tree / "out").mkdir()
    (tree / "out" / "b.onnx").touch()
    how = place or {"directory": "out"}
    if isinstance(expected, list):
        assert found(*models, **how) == expected
        return
    with pytest.raises(WriteError, match=expected):
        found(*models, **how)


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


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("name", ["stat", "lstat", "scandir"])
@pytest.mark.parametrize("end", ["layer_2", "layer_10", "a.onnx", "tree", "out"])
def test_query_that_fails_splits_no_set(
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
