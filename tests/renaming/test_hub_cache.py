"""A model in a Hugging Face cache: read through its links, never changed where it is."""

from __future__ import annotations

import os
from pathlib import Path

import models as builders
import pytest
from genai_folders import RULES, build_decoder, build_folder
from hub_cache import store_in_cache
from kill_commands import read_directory
from models import saved
from onnx import ModelProto, TensorProto

DATA = "model.onnx_data"


def build_model() -> ModelProto:
    """A decoder with external data."""
    weights = builders.tensor("w", *range(8))
    weights.data_location = TensorProto.EXTERNAL
    weights.ClearField("float_data")
    weights.external_data.add(key="location", value=DATA)
    model = build_decoder()
    model.graph.initializer.append(weights)
    return model


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a repository with a model in `onnx`, as transformers.js has it."""
    (tmp_path / "rules.toml").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    (folder / "onnx").mkdir(parents=True)
    saved(build_model(), folder / "onnx" / "model.onnx")
    (folder / "onnx" / DATA).write_bytes(bytes(range(32)))
    (folder / "config.json").write_text("{}")
    return store_in_cache(tmp_path / "hub", folder)


@pytest.fixture
def go(run):
    """Run a rename with the rules."""
    return lambda *args: run(*args, "--prefix", "VLLM", "--rules", "rules.toml")


def test_a_result_elsewhere_has_the_data_as_files(snapshot: Path, go, run) -> None:
    before = {path: os.readlink(path) for path in snapshot.rglob("*") if path.is_symlink()}
    model = snapshot / "onnx" / "model.onnx"
    for options in (("-d", "out"), ("-o", "new/model.onnx")):
        outcome = go(model, *options)
        assert (outcome.code, "KV5" in outcome.err) == (0, False)
    for folder in ("out", "new"):
        assert Path(folder, DATA).read_bytes() == bytes(range(32))
        assert not any(path.is_symlink() for path in Path(folder).iterdir())
        assert run("verify", f"{folder}/model.onnx", "--rules", "rules.toml").code == 0
    assert {path: os.readlink(path) for path in before} == before
    assert run("out/model.onnx", "--strip", "--rules", "rules.toml").code == 0
    assert Path("out/model.onnx").read_bytes() == model.read_bytes()


def test_a_whole_snapshot_and_the_whole_repository_go_elsewhere(snapshot: Path, go) -> None:
    assert go(snapshot, "-d", "out").code == 0
    assert read_directory(Path("out/onnx")).keys() == {"model.onnx", DATA}
    assert go(snapshot.parents[1], "-d", "all").code == 0
    assert len(list(Path("all").rglob(DATA))) == 1


def test_equal_models_that_share_a_blob_both_come_out(snapshot: Path, go) -> None:
    link = snapshot / "onnx" / "model_quantized.onnx"
    link.symlink_to(os.readlink(snapshot / "onnx" / "model.onnx"))
    assert go(snapshot, "-d", "out").code == 0
    results = read_directory(Path("out/onnx"))
    assert results.keys() == {"model.onnx", link.name, DATA}
    assert results["model.onnx"] == results[link.name]


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_in_place_is_refused_with_the_option_that_works(
    more: tuple[str, ...], snapshot: Path, go
) -> None:
    model = (snapshot / "onnx" / "model.onnx").relative_to(Path.cwd())
    before = read_directory(snapshot / "onnx")
    outcome = go(model, *more)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "Hugging Face cache" in outcome.err
    assert "`-d ./tiny-ONNX`" in outcome.err
    assert read_directory(snapshot / "onnx") == before
    assert go(model, "-d", "./tiny-ONNX").code == 0
    assert read_directory(Path("tiny-ONNX")).keys() == {"model.onnx", DATA}


def test_a_command_that_is_too_long_for_a_line_is_not_cut(snapshot: Path, go) -> None:
    model = Path("hub", *["..", "hub"] * 40, snapshot.relative_to(Path("hub").absolute()))
    model /= "onnx/model.onnx"
    outcome = go(model)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.endswith("(`-d ./tiny-ONNX` writes elsewhere)\n")


def test_the_file_behind_the_link_is_protected_too(snapshot: Path, go) -> None:
    blob = Path(os.path.realpath(snapshot / "onnx" / "model.onnx"))
    assert go(blob, "--force").code == 2


def test_a_configuration_of_onnxruntime_genai_follows_its_model(snapshot: Path, go) -> None:
    folder = build_folder(Path("folder2"))
    stored = store_in_cache(Path("hub").absolute(), folder, "models--me--genai")
    assert go(stored, "-d", "out").code == 0
    assert read_directory(Path("out")).keys() == {"model.onnx", "genai_config.json"}
    assert Path("out/genai_config.json").read_text().count("_VLLM") == 4
    assert not any(path.is_symlink() for path in Path("out").iterdir())


def test_equal_folders_of_a_repository_share_blobs_and_both_come_out(
    tmp_path: Path, go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal configurations and models are one blob each."""
    monkeypatch.chdir(tmp_path)
    Path("rules.toml").write_text(RULES)
    for name in ("cpu", "gpu"):
        build_folder(Path("both", name))
    stored = store_in_cache(Path("hub").absolute(), Path("both").absolute())
    outcome = go(stored, "-d", "out")
    assert (outcome.code, "KV4" in outcome.err) == (0, False)
    for name in ("cpu", "gpu"):
        results = read_directory(Path("out", name))
        assert results.keys() == {"model.onnx", "genai_config.json"}
        assert results["genai_config.json"].count(b"_VLLM") == 4


@pytest.fixture
def real_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot without links, as on a system that has none: the files are in it."""
    monkeypatch.chdir(tmp_path)
    Path("rules.toml").write_text(RULES)
    repository = tmp_path / "hub" / "models--me--tiny-ONNX"
    (repository / "blobs").mkdir(parents=True)
    return build_folder(repository / "snapshots" / "0123")


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_a_real_file_of_a_snapshot_is_not_changed_in_place(
    more: tuple[str, ...], real_files: Path, go
) -> None:
    before = read_directory(real_files)
    for source in (real_files.relative_to(Path.cwd()), real_files / "model.onnx"):
        outcome = go(source, *more)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1)
        assert "Hugging Face cache" in outcome.err
    assert read_directory(real_files) == before
    assert "`-d ./tiny-ONNX`" in outcome.err
    assert go(real_files / "model.onnx", "-d", "./tiny-ONNX").code == 0
    assert Path("tiny-ONNX", "model.onnx").is_file()


@pytest.mark.parametrize("more", [(), ("--force",)])
@pytest.mark.parametrize(
    "place",
    [
        ("-o", "snapshots/0123/other.onnx"),
        ("-o", f"blobs/{'d' * 64}.onnx"),
        ("-d", "snapshots/new"),
        ("-d", "snapshots/0123/sub/dir"),
        ("-d", "blobs"),
    ],
    ids=" ".join,
)
def test_no_result_goes_into_a_cache(
    place: tuple[str, str], more: tuple[str, ...], real_files: Path, go
) -> None:
    """Neither by its own path nor through a link to the repository."""
    repository = real_files.parents[1]
    Path("link").symlink_to(repository)
    before = sorted(repository.rglob("*"))
    option, path = place
    for parent in (repository.relative_to(Path.cwd()), Path("link")):
        outcome = go(real_files / "model.onnx", option, parent / path, *more)
        assert (outcome.code, outcome.err.count("error:")) == (2, 1)
        assert "Hugging Face cache" in outcome.err
    assert sorted(repository.rglob("*")) == before
    assert "`-d ./tiny-ONNX`" in outcome.err


def test_the_directory_of_a_hint_leads_out_of_a_cache_one_is_in(
    real_files: Path, go, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = Path("rules.toml").absolute()
    monkeypatch.chdir(real_files)
    (real_files / "rules.toml").write_bytes(rules.read_bytes())
    assert go("model.onnx").err.endswith("(`-d ~/tiny-ONNX` writes elsewhere)\n")


def test_a_whole_cache_goes_elsewhere_with_its_folders_but_into_no_other_cache(
    real_files: Path, go
) -> None:
    assert go(real_files.parents[2], "-d", "out").code == 0
    assert Path("out", "models--me--tiny-ONNX", "snapshots", "0123", "model.onnx").is_file()
    Path("other", "models--me--tiny-ONNX", "blobs").mkdir(parents=True)
    outcome = go(real_files.parents[2], "-d", "other")
    assert outcome.code == 2
    assert "Hugging Face cache" in outcome.err
    assert not list(Path("other").rglob("*.onnx"))


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "--force", "--html"),
        ("inspect", "--html"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("place", ["snapshots/0123/config.json", "snapshots/0123/x", "blobs/x"])
def test_no_other_file_is_written_into_a_cache(
    command: tuple[str, ...], place: str, real_files: Path, run
) -> None:
    repository = real_files.parents[1]
    (real_files / "config.json").write_text("{}")
    before = read_directory(real_files)
    name, *options = command
    rules = ("--rules", "rules.toml")
    output = repository / place
    outcome = run(name, real_files / "model.onnx", *rules, *options, output)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert f"{output}: is in a" in outcome.err
    elsewhere = f"./{output.name}"
    assert f"{elsewhere} instead" in outcome.err
    assert read_directory(real_files) == before
    assert not list((repository / "blobs").iterdir())
    assert run(name, real_files / "model.onnx", *rules, *options, elsewhere).code == 0
