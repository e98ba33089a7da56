from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import onnx
import pytest
from tiers import thin

from onnxkvrename import (
    Finding,
    KvRenameError,
    ModelError,
    WriteError,
    load_rules,
    rename,
    rename_all,
)
from onnxkvrename.files.find import build_job
from onnxkvrename.files.inside import Folder
from onnxkvrename.files.read import FileIdentity, OpenFile, OutsideError, open_file
from onnxkvrename.files.temp_file import TempFile, build_key, build_temp_name
from onnxkvrename.model.external_data import find_data_files
from onnxkvrename.model.proto_reader import ExternalReference
from onnxkvrename.renaming.prepare import prepare_model
from onnxkvrename.renaming.write import list_results, write_result
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A place for a model, with data of ten bytes beside it, and others elsewhere."""
    here = tmp_path / "here"
    for directory in (here / "sub", tmp_path / "elsewhere"):
        directory.mkdir(parents=True)
        (directory / "w.bin").write_bytes(bytes(10))
    (here / "w.bin").write_bytes(bytes(10))
    (here / "w..bin").write_bytes(bytes(10))
    (here / "model.onnx").write_bytes(b"model")
    (here / "within").symlink_to("w.bin")
    (here / "without").symlink_to("../elsewhere/w.bin")
    (here / "linked").symlink_to("../elsewhere")
    (here / "loop").symlink_to("loop")
    os.link(here / "model.onnx", here / "twin.onnx")
    os.mkfifo(here / "pipe")
    return here / "model.onnx"


def located(model: Path, *references: ExternalReference) -> list[str]:
    """For each reference the path below the model's directory, or the finding."""
    with open_file(model) as file:
        all_found = list(find_data_files(references, file))
    return [
        f"{found.code} {found.message}"
        if isinstance(found, Finding)
        else str(found.path.relative_to(model.parent))
        for found in all_found
    ]


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("w.bin", "w.bin"),
        ("./w.bin", "w.bin"),
        ("sub/w.bin", "sub/w.bin"),
        ("w..bin", "w..bin"),
        ("within", "w.bin"),
        ("../elsewhere/w.bin", "KV501"),
        ("../here/w.bin", "KV501"),
        ("sub/../w.bin", "KV501"),
        ("sub/../../elsewhere/w.bin", "KV501"),
        ("/etc/passwd", "KV501"),
        ("C:\\w.bin", "KV501"),
        ("C:w.bin", "KV501"),
        ("\\\\host\\share\\w.bin", "KV501"),
        ("sub\\..\\..\\w.bin", "KV501"),
        ("w.bin\0", "KV501"),
        ("without", "KV501"),
        ("linked/w.bin", "KV501"),
        ("model.onnx", "KV501 is the model itself"),
        ("twin.onnx", "KV501 is the model itself"),
        ("none", "KV502 holds w, but is missing"),
        ("~", "KV502"),
        ("file:///etc/passwd", "KV502"),
        ("n" * 5000, "KV502"),
        ("loop", "KV502"),
        (".", "KV502 holds w, but is a directory"),
        ("sub", "KV502 holds w, but is a directory"),
        ("pipe", "KV502 holds w, but is not a regular file"),
    ],
)
def test_data_must_be_a_file_that_lies_with_the_model(
    location: str, expected: str, model: Path
) -> None:
    (found,) = located(model, ExternalReference(location, 10, "w"))
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        (
            ExternalReference("../w.bin", 1, "w"),
            "put the data beside the model, and write only its file name in the location",
        ),
        (ExternalReference("without", 1, "w"), "replace the link with a copy"),
        (ExternalReference("twin.onnx", 1, "w"), "export the model again"),
        (ExternalReference("none", 1, "w"), "put it beside the model, in {directory}"),
        (ExternalReference("pipe", 1, "w"), "replace it with a regular file that you can read"),
        (
            ExternalReference("w.bin", 11, "w"),
            "the file was truncated or belongs to another model: copy it again",
        ),
        (ExternalReference("", 0, "w", "has no location"), "export the model again"),
    ],
)
def test_a_finding_on_data_says_how_to_fix_it(
    reference: ExternalReference, hint: str, model: Path
) -> None:
    with open_file(model) as file:
        (found,) = find_data_files([reference], file)
    assert isinstance(found, Finding)
    assert found.hint == hint.format(directory=model.parent)
    assert found.name == (reference.location or "w")


def test_data_must_be_long_enough(model: Path) -> None:
    assert located(model, ExternalReference("w.bin", 11, "w")) == [
        "KV503 has 10 bytes, but w ends at 11"
    ]
    assert located(model, ExternalReference("w.bin", 1 << 60, "w"))[0].startswith("KV503")


def test_an_entry_that_is_wrong_in_itself_is_not_looked_for(model: Path) -> None:
    (found,) = located(model, ExternalReference("", 0, "w", "has no location"))
    assert found == "KV503 external data of w has no location"


def test_each_file_is_given_once(model: Path) -> None:
    references = [ExternalReference("w.bin", end, f"w{end}") for end in (1, 2)]
    assert located(model, *references) == ["w.bin"]


def test_a_file_is_opened_once_however_many_tensors_it_holds(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = [ExternalReference("w.bin", number % 10, f"w{number}") for number in range(1000)]
    references.append(ExternalReference("w.bin", 11, "last"))
    opened: list[object] = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda *args, **how: opened.append(args[0]) or real(*args, **how)
    )
    assert located(model, *references) == ["w.bin", "KV503 has 10 bytes, but last ends at 11"]
    assert opened == [model, model.parent / "w.bin"]


def test_a_file_is_judged_for_each_tensor(model: Path) -> None:
    """Also if the first one does not fit into it."""
    references = [ExternalReference("w.bin", end, f"w{end}") for end in (11, 10, 12)]
    assert [line[:5] for line in located(model, *references)] == ["KV503", "w.bin", "KV503"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_a_file_that_cannot_be_opened_is_not_called_missing(
    number: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def fail(path: object, *args: Any, **kwargs: Any) -> int:
        if path == model.parent / "w.bin":
            raise OSError(number, os.strerror(number))
        return real(path, *args, **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", fail)
    (found,) = located(model, ExternalReference("w.bin", 10, "w"))
    assert found == f"KV502 holds w, but cannot be read: {os.strerror(number)}"


def test_data_is_looked_for_beside_the_model_that_is_open(model: Path, tmp_path: Path) -> None:
    """A directory that was exchanged meanwhile has another file by the name of the model."""
    (tmp_path / "elsewhere" / "model.onnx").write_bytes(b"other")
    with open_file(model) as file:
        model.parent.rename(tmp_path / "gone")
        model.parent.symlink_to("elsewhere")
        with pytest.raises(ModelError, match="was changed by another program during the run"):
            list(find_data_files([ExternalReference("w.bin", 10, "w")], file))


def test_a_hard_link_is_as_good_as_the_file(model: Path) -> None:
    """A copy is a file of its own, as onnx requires."""
    os.link(model.parent / "w.bin", model.parent / "hard")
    assert located(model, ExternalReference("hard", 10, "w")) == ["hard"]


def test_a_model_in_the_working_directory_needs_no_directory_in_its_path(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    with open_file(Path("model.onnx")) as file:
        (found,) = find_data_files([ExternalReference("w.bin", 10, "w")], file)
    assert not isinstance(found, Finding)


# Data on their way with the model.

DATA = "decoder.onnx.data"


def test_in_the_same_directory_data_stay_untouched(external: Path, snapshot) -> None:
    before = snapshot(external.parent)[DATA]
    rename(external, "VLLM", output=external.with_name("renamed.onnx"))
    rename(external, "VLLM")
    after = snapshot(external.parent)
    assert after.pop(DATA) == before
    assert set(after) == {"decoder.onnx", "renamed.onnx"}


def test_into_another_directory_data_are_copied_with_their_mode(
    external: Path, tmp_path: Path
) -> None:
    (external.parent / DATA).chmod(0o604)
    report = rename(external, "VLLM", output=tmp_path / "new" / "dir" / "m.onnx")
    copy = tmp_path / "new" / "dir" / DATA
    assert report.status == "renamed"
    assert copy.read_bytes() == (external.parent / DATA).read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o604
    assert not copy.is_symlink()
    assert copy.stat().st_nlink == 1


def test_the_same_data_there_already_are_left_alone(external: Path, tmp_path: Path) -> None:
    (tmp_path / DATA).write_bytes((external.parent / DATA).read_bytes())
    os.utime(tmp_path / DATA, ns=(0, 0))
    assert rename(external, "VLLM", output=tmp_path / "m.onnx").status == "renamed"
    assert (tmp_path / DATA).stat().st_mtime_ns == 0


def test_data_that_are_gone_are_put_back_beside_a_result_that_stands(
    external: Path, tmp_path: Path
) -> None:
    rename(external, "VLLM", output=tmp_path / "m.onnx")
    (tmp_path / DATA).unlink()
    assert rename(external, "VLLM", output=tmp_path / "m.onnx").status == "renamed"
    assert (tmp_path / DATA).read_bytes() == (external.parent / DATA).read_bytes()


@pytest.mark.parametrize("link", [False, True])
def test_other_data_there_are_replaced_only_with_force(
    link: bool, external: Path, tmp_path: Path
) -> None:
    output, there = tmp_path / "m.onnx", tmp_path / DATA
    if link:
        there.symlink_to("nowhere")
    else:
        there.write_bytes(b"other")
    report = rename(external, "VLLM", output=output)
    assert [(found.code, found.name) for found in report.findings] == [("KV504", str(there))]
    difference = "is a broken link" if link else f"differs from {DATA} beside the source"
    assert report.findings[0].message == f"already exists, and {difference}"
    assert report.findings[0].hint == "choose an empty directory, or force=True to replace it"
    assert there.is_symlink() or there.read_bytes() == b"other"
    assert not output.exists()
    assert rename(external, "VLLM", output=output, force=True).status == "renamed"
    assert there.read_bytes() == (external.parent / DATA).read_bytes()


def test_a_directory_there_is_not_replaced_even_with_force(external: Path, tmp_path: Path) -> None:
    (tmp_path / DATA).mkdir()
    report = rename(external, "VLLM", output=tmp_path / "m.onnx")
    assert [(found.code, found.message) for found in report.findings] == [
        ("KV504", "already exists, and is a directory")
    ]
    with pytest.raises(WriteError, match="is a directory"):
        rename(external, "VLLM", output=tmp_path / "m.onnx", force=True)
    assert not (tmp_path / "m.onnx").exists()


def test_data_there_that_cannot_be_read_are_not_called_different(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, real = tmp_path / DATA, os.open
    there.write_bytes(b"other")

    def fail(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == there:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    report = rename(external, "VLLM", output=tmp_path / "m.onnx")
    (finding,) = report.findings
    assert finding.code == "KV504"
    assert finding.message == "already exists, and cannot be read: Input/output error"
    assert rename(external, "VLLM", output=tmp_path / "m.onnx", force=True).status == "renamed"


def test_with_force_a_link_is_replaced_and_what_it_leads_to_is_not(
    external: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / DATA).symlink_to(tmp_path / "precious")
    rename(external, "VLLM", output=tmp_path / "out" / "m.onnx", force=True)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert not (tmp_path / "out" / DATA).is_symlink()


def test_data_that_are_too_short_stop_everything(external: Path, tmp_path: Path) -> None:
    os.truncate(external.parent / DATA, 100)
    report = rename(external, "VLLM", output=tmp_path / "m.onnx")
    assert (report.status, [found.code for found in report.findings]) == ("failed", ["KV503"])
    assert not (tmp_path / "m.onnx").exists()
    assert report.findings[0].severity == "error"


def test_a_model_that_has_its_token_still_takes_its_data_along(
    external: Path, tmp_path: Path
) -> None:
    rename(external, "VLLM")
    report = rename(external, "VLLM", output=tmp_path / "m.onnx")
    assert report.status == "unchanged"
    assert (tmp_path / "m.onnx").read_bytes() == external.read_bytes()
    assert (tmp_path / DATA).exists()


# Whoever changes the directory during a rename: no byte from outside is in the result.

WATCHED = (
    *("open", "readlink", "stat", "lstat", "fstat", "pread", "copy_file_range", "splice"),
    *("sendfile", "link", "replace", "fsync", "fchmod"),
)
SECRET = b"secret" * 1000


def exchange(path: Path, link: Path) -> None:
    """Exchange a path with a prepared link."""
    aside = path.with_name("aside")
    os.rename(path, aside)
    os.rename(link, path)
    os.rename(aside, link)


@pytest.fixture
def attacked(external: Path, tmp_path: Path) -> Path:
    """A model with data in a directory below, and a file of the same name and size outside."""
    model = onnx.load(external, load_external_data=False)
    directory = external.parent / "sub"
    directory.mkdir()
    (external.parent / DATA).rename(directory / DATA)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = f"sub/{DATA}"
    external.write_bytes(model.SerializeToString())
    size = (directory / DATA).stat().st_size
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / DATA).write_bytes((SECRET * (size // len(SECRET) + 1))[:size])
    return external


def follow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open data files as a naive program would, for the control."""

    @contextmanager
    def naive(self: Folder, location: str) -> Iterator[OpenFile]:
        path = os.path.realpath(self.path / location)
        if not path.startswith(f"{self.path}/"):
            raise OutsideError("leads out", path=path)
        with open_file(Path(path)) as file:
            yield file

    monkeypatch.setattr(Folder, "open_file", naive)
    monkeypatch.setattr(FileIdentity, "matches", lambda self, other: True)


def copy_data(model: Path, output: Path, rules: Rules) -> tuple[str, bytes]:
    """Prepare a model and copy its data, as a rename does, and return what became of it."""
    job = build_job(model, output / "m.onnx")
    prepared = prepare_model(job, Request(token="VLLM"), rules)
    if prepared.report.failed:
        return "found", b""
    data = list_results([prepared], (), force=False)[0].output
    try:
        with TempFile(output / build_temp_name(build_key(), "new"), data.target) as file:
            write_result(data, file)
            return "copied", file.read(0, file.size)
    except KvRenameError:
        return "refused", b""


def find_foreign_results(
    model: Path, target: Path, link: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, set[str]]:
    """Copy the data of a model again and again, with a swap before each call of the system.

    Returns:
        The number of copies with bytes from outside, and what became of all.
    """
    rules, foreign, outcomes, number, calls = load_rules(), 0, set[str](), 0, 1
    (output / "sub").mkdir(parents=True)
    while calls >= number:
        calls, number = 0, number + 1
        with monkeypatch.context() as patch:

            def wrap(real: Callable[..., Any], number: int = number) -> Any:
                def call(*args: Any, **kwargs: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == number:
                        exchange(target, link)
                    return real(*args, **kwargs)

                return call

            for name in WATCHED:
                if hasattr(os, name):
                    patch.setattr(os, name, wrap(getattr(os, name)))
            outcome, content = copy_data(model, output, rules)
        outcomes.add(outcome)
        foreign += b"secret" in content
        if target.is_symlink():
            exchange(target, link)
    return foreign, outcomes


@pytest.mark.parametrize("target", thin(["sub", f"sub/{DATA}"], 1))
@pytest.mark.parametrize("is_control", [False, True], ids=["this", "control"])
def test_a_swap_at_any_moment_of_a_rename_brings_no_foreign_bytes(
    target: str, is_control: bool, attacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_control:
        follow_links(monkeypatch)
    path, link = attacked.parent / target, attacked.parent / "link"
    link.symlink_to(tmp_path / "outside" / (DATA if path.is_file() else ""))
    foreign, outcomes = find_foreign_results(attacked, path, link, tmp_path / "out", monkeypatch)
    assert (foreign > 0) == is_control
    assert outcomes == {"copied", "found", "refused"} or is_control


# Wherever a tensor can be, it may have its data in a file.


def external_tensor(name: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, dims=[10], data_type=onnx.TensorProto.UINT8)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=f"{name}.bin")
    return tensor


def constant(name: str) -> onnx.NodeProto:
    """A node with a tensor in a file, as an attribute."""
    return onnx.helper.make_node("Constant", [], [f"{name}_value"], value=external_tensor(name))


def put_into_initializer(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(external_tensor("w"))


def put_into_sparse_initializer(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add(values=external_tensor("w"), dims=[10])


def put_into_attribute(model: onnx.ModelProto) -> None:
    model.graph.node.append(constant("w"))


def put_into_attribute_with_several(model: onnx.ModelProto) -> None:
    node = model.graph.node.add(op_type="Custom", domain="local", output=["several"])
    node.attribute.add(name="all", type=onnx.AttributeProto.TENSORS).tensors.append(
        external_tensor("w")
    )


def put_into_subgraph(model: onnx.ModelProto) -> None:
    model.graph.node.append(models.branch(models.graph(constant("w"))))


def put_into_function(model: onnx.ModelProto) -> None:
    model.functions.add(name="Local", domain="local", node=[constant("w")])


def put_into_subgraph_of_function(model: onnx.ModelProto) -> None:
    branch = models.branch(models.graph(constant("w")))
    model.functions.add(name="Local", domain="local", node=[branch])


def put_into_training_graph(model: onnx.ModelProto) -> None:
    model.training_info.add().algorithm.node.append(constant("w"))


@pytest.mark.parametrize(
    "put",
    [
        put_into_initializer,
        put_into_sparse_initializer,
        put_into_attribute,
        put_into_attribute_with_several,
        put_into_subgraph,
        put_into_function,
        put_into_subgraph_of_function,
        put_into_training_graph,
    ],
    ids=lambda put: put.__name__.removeprefix("put_into_"),
)
def test_data_are_copied_and_missed_wherever_their_tensor_is(put, tmp_path: Path) -> None:
    here = tmp_path / "model"
    here.mkdir()
    proto = models.decoder()
    put(proto)
    path = models.saved(proto, here / "m.onnx")
    report = rename_all([path], "VLLM", directory=tmp_path / "without")
    assert [finding.code for finding in report.models[0].findings] == ["KV502"]
    (here / "w.bin").write_bytes(bytes(range(10)))
    rename(path, "VLLM", output=tmp_path / "with" / "m.onnx")
    assert (tmp_path / "with" / "w.bin").read_bytes() == bytes(range(10))
