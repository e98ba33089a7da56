"""Results that would destroy a file of the same run: refused, forced or not, with nothing done."""

from __future__ import annotations

import os
from pathlib import Path

import models
import onnx
import pytest
from custom_io_files import format_custom_io
from models import saved

NAMES = [(f"past_{part}.0", f"past_{part}.0_RetainedState") for part in ("key", "value")]


def build_model(location: str | None = None, size: int = 4) -> onnx.ModelProto:
    """Build a decoder, with external data if it has a location for them."""
    model = models.decoder()
    if location is not None:
        weight = model.graph.initializer.add(name="w", dims=[size], data_type=2, data_location=1)
        weight.external_data.add(key="location", value=location)
    return model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, and one whose weights are the other's bytes."""
    saved(build_model(), tmp_path / "weights.onnx")
    saved(build_model("weights.onnx"), tmp_path / "reader.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


FORCE = pytest.mark.parametrize("force", [(), ("--force",)])


@FORCE
@pytest.mark.parametrize("given", ["weights.onnx", "link.onnx", "alias/weights.onnx", "twin.onnx"])
def test_a_model_that_is_external_data_of_another_is_not_renamed(
    given: str, force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    (here / "link.onnx").symlink_to("weights.onnx")
    (here / "alias").symlink_to(".")
    if given == "twin.onnx":
        os.link("weights.onnx", given)
    before = snapshot(here)
    outcome = run("reader.onnx", given, "--prefix", "VLLM", *force)
    assert outcome.code == 2
    if force or given not in ("link.onnx", "twin.onnx"):  # those are not changed without force
        assert f"{given}: is external data of reader.onnx" in outcome.err
    assert snapshot(here) == before


def test_one_that_does_not_change_may_be(here: Path, run) -> None:
    assert run("weights.onnx", "--prefix", "VLLM").code == 0
    assert run("reader.onnx", "weights.onnx", "--prefix", "VLLM").code == 0


def test_both_may_go_elsewhere(here: Path, run) -> None:
    """The copy of the data then is the result of nothing else: the names differ."""
    data = Path("weights.onnx").read_bytes()
    Path("sub").mkdir()
    os.rename("weights.onnx", "sub/weights.onnx")
    saved(build_model("sub/weights.onnx"), here / "reader.onnx")
    assert run("reader.onnx", "--prefix", "VLLM", "-d", "out").code == 0
    assert Path("out/sub/weights.onnx").read_bytes() == data


@FORCE
def test_a_result_does_not_land_on_the_data_of_another(
    force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    outcome = run("reader.onnx", "weights.onnx", "--prefix", "VLLM", "-d", "out", *force)
    assert outcome.code == 2
    assert f"{Path('out/weights.onnx')}: is " in outcome.err
    assert snapshot(here) == before


@FORCE
@pytest.mark.parametrize("place", ["present", "missing"])
def test_a_model_and_its_sidecar_have_two_places(
    place: str, force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    Path("custom_io.yaml").write_text(format_custom_io(NAMES, "mxint8"))
    Path("out").mkdir()
    if place == "present":
        Path("out/custom_io.yaml").write_text("mine")
    before = snapshot(here)
    args = ("weights.onnx", "--prefix", "VLLM", "--sidecar", "custom_io.yaml")
    outcome = run(*args, "-o", "out/custom_io.yaml", *force)
    assert outcome.code == 2
    assert snapshot(here) == before


@FORCE
def test_nor_do_sidecars_and_data_share_one(
    force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    Path("in").mkdir()
    Path("in/custom_io.yaml").write_text("data")
    saved(build_model("custom_io.yaml"), here / "in" / "m.onnx")
    Path("custom_io.yaml").write_text(format_custom_io(NAMES, "mxint8"))
    before = snapshot(here)
    args = ("in/m.onnx", "--prefix", "VLLM", "--sidecar", "custom_io.yaml", "-d", "out")
    outcome = run(*args, *force)
    assert outcome.code == 2
    assert "custom_io.yaml" in outcome.err
    assert snapshot(here) == before


@FORCE
def test_a_sidecar_that_is_external_data_of_a_model_stays(
    force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    Path("custom_io.yaml").write_text(format_custom_io(NAMES, "mxint8"))
    saved(build_model("custom_io.yaml"), here / "m.onnx")
    before = snapshot(here)
    outcome = run("m.onnx", "--prefix", "VLLM", "--sidecar", "custom_io.yaml", *force)
    assert outcome.code == 2
    assert "custom_io.yaml: is external data" in outcome.err
    assert snapshot(here) == before


@FORCE
@pytest.mark.parametrize("output", ["rules.toml", "alias/rules.toml"])
def test_the_rules_of_the_run_stay(
    output: str, force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    from onnxkvrename.rules.load import PROFILES_DIRECTORY

    Path("rules.toml").write_bytes((PROFILES_DIRECTORY / "qeff.toml").read_bytes())
    Path("alias").symlink_to(".")
    before = snapshot(here)
    args = ("weights.onnx", "--prefix", "VLLM", "--rules", "rules.toml", "-o", output)
    outcome = run(*args, *force)
    assert outcome.code == 2
    assert snapshot(here) == before


@FORCE
def test_a_result_is_not_a_directory_that_data_need(
    force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    Path("in/data").mkdir(parents=True)
    Path("in/data/w.bin").write_bytes(b"data")
    saved(build_model("data/w.bin"), here / "in" / "m.onnx")
    before = snapshot(here)
    outcome = run("in/m.onnx", "--prefix", "VLLM", "-o", "out/data", *force)
    assert outcome.code == 2
    assert "must be a directory" in outcome.err
    assert f"{Path('out/data/w.bin')}" in outcome.err
    assert snapshot(here) == before


@FORCE
def test_data_that_are_in_place_are_not_replaced_by_those_of_another_model(
    force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    """The first model needs no copy there, so only the second one would write."""
    for name, data in (("a", b"aaaa"), ("b", b"bbbb")):
        Path(name).mkdir()
        Path(name, "w.bin").write_bytes(data)
        saved(build_model("w.bin"), here / name / f"{name}.onnx")
    Path("out").mkdir()
    Path("out/w.bin").write_bytes(b"aaaa")
    from onnxkvrename import load_rules
    from onnxkvrename.files.find import build_job
    from onnxkvrename.renaming.run import rename_batch
    from onnxkvrename.rules.request import Request

    before = snapshot(here)
    jobs = [build_job(Path(f"{name}/{name}.onnx"), Path(f"out/{name}.onnx")) for name in "ab"]
    request = Request(token="VLLM", force=bool(force))
    report = rename_batch(request, jobs, load_rules())
    assert report.failed
    assert "two different" in str(report.models[1].error)
    assert snapshot(here) == before


def test_models_that_share_their_data_still_do(here: Path, run) -> None:
    Path("set").mkdir()
    Path("set/w.bin").write_bytes(b"data")
    for name in ("a", "b"):
        saved(build_model("w.bin"), here / "set" / f"{name}.onnx")
    assert run("set", "--prefix", "VLLM", "-d", "out").code == 0
    assert sorted(os.listdir("out")) == ["a.onnx", "b.onnx", "w.bin"]
    assert run("set", "--prefix", "VLLM", "-d", "out").code == 0
