"""Consumers are found by their names: each is a module of the package."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from onnxkvrename.errors import KvRenameError
from onnxkvrename.handoff import consumers
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import list_consumers, load_consumer

ALIKE = "all with the same shape and dtype; based on names, shapes, dtypes and dataflow"
PIGEON = '''
"""A consumer that carries whole buffers by hand."""

from onnxkvrename.handoff.consumer import Consumer

CONSUMER = Consumer(
    name="pigeon-post",
    token="pigeon",
    selects_input=lambda name: name.endswith("pigeon"),
    selects_output=lambda name: name.endswith("pigeon_RetainedState"),
    input_name_of=lambda name: name.removesuffix("_RetainedState"),
    sort_key=lambda name: (int(name.partition(".")[2].partition("_")[0]), name),
    transferred_shape=lambda shape, tokens: shape,
    itemsize_of={"FLOAT": 4}.get,
)
'''


CANNOT_TAKE = (
    "{}: vllm-qaic cannot use it; with VLLM_QAIC_USE_LEGACY_SLICING_SPEC=1 it can "
    "(--target vllm-qaic-legacy)\n"
)


@pytest.fixture
def built_in_pigeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of consumers, with one file more."""
    (tmp_path / "consumers").mkdir()
    (tmp_path / "consumers" / "pigeon_post.py").write_text(PIGEON, "utf-8")
    monkeypatch.setattr(consumers, "__path__", [*consumers.__path__, str(tmp_path / "consumers")])
    monkeypatch.delitem(sys.modules, f"{consumers.__name__}.pigeon_post", raising=False)


def read_choices(page: str) -> list[str]:
    """Read the consumers in a help page, which may wrap a name at a hyphen."""
    return "".join(page.split()).partition("oneof:")[2].partition(".")[0].split(",")


def test_vllm_qaic_is_built_in() -> None:
    assert "vllm-qaic" in list_consumers()
    assert load_consumer("vllm-qaic").token == "vllmKvCache"


def test_the_example_in_the_package_is_a_consumer() -> None:
    example = textwrap.dedent((consumers.__doc__ or "").partition("::\n")[2])
    module: dict[str, Any] = {}
    exec(example, module)
    assert isinstance(module["CONSUMER"], Consumer)
    assert module["CONSUMER"].sort_key("past_key.3_pigeon") == (3, "past_key.3_pigeon")


def test_every_target_is_called_like_its_module() -> None:
    assert all(load_consumer(name).name == name for name in list_consumers())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vllm_qaic", "did you mean vllm-qaic?"),
        ("x", f"targets: {', '.join(list_consumers())}"),
        ("", "targets: "),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, hint: str) -> None:
    with pytest.raises(KvRenameError, match="no such target: ") as raised:
        load_consumer(name)
    assert hint in str(raised.value)


@pytest.mark.usefixtures("built_in_pigeon")
def test_another_consumer_is_one_file(decoder: Path, run: Run) -> None:
    assert run(decoder, "--target", "pigeon-post", "-q") == (0, "", "")
    checked = run("verify", decoder, "--target", "pigeon-post")
    assert (checked.code, checked.err) == (0, "")
    assert f"\n{decoder}: ready for pigeon-post: it will select, pair and" in checked.out
    compared = run("compare", decoder, decoder, "--target", "pigeon-post")
    assert "works" in compared.out


@pytest.mark.usefixtures("built_in_pigeon")
def test_what_goes_for_all_consumers_goes_for_it(decoder: Path, run: Run) -> None:
    outcome = run("verify", decoder, "--target", "pigeon-post")
    assert outcome.code == 1
    assert "error KV601: 8 names (first: past_key.0) do not carry the token pigeon" in outcome.err
    assert "KV604" not in outcome.err


@pytest.mark.usefixtures("built_in_pigeon")
def test_another_consumer_changes_no_default(decoder: Path, run: Run) -> None:
    assert "pigeon-post" in list_consumers()
    assert run("verify", decoder).code == 0
    compared = run("compare", decoder, decoder, "--format", "json")
    assert '"target": "vllm-qaic"' in compared.out
    page = run("compare", "--help").out
    assert read_choices(page) == list(list_consumers())
    assert "default:vllm-qaic]" in "".join(page.split())
