"""Consumers are found by the names of their modules; another one is one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxkvrename.errors import KvRenameError
from onnxkvrename.handoff import consumers
from onnxkvrename.handoff.consumer import list_consumers, load_consumer

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
    is_appended_output=lambda name: False,
    itemsize_of={"FLOAT": 4}.get,
)
'''


@pytest.fixture
def pigeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package with one file more."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "pigeon_post.py").write_text(PIGEON, "utf-8")
    paths = [*consumers.__path__, str(tmp_path / "more")]
    monkeypatch.setattr(consumers, "__path__", paths)
    yield
    sys.modules.pop("onnxkvrename.handoff.consumers.pigeon_post", None)


def test_there_is_one() -> None:
    assert list_consumers() == ("vllm-qaic",)
    assert load_consumer("vllm-qaic").token == "vllmKvCache"


def test_every_target_is_called_like_its_module() -> None:
    assert all(load_consumer(name).name == name for name in list_consumers())


@pytest.mark.parametrize(
    ("name", "hint"),
    [("vllm_qaic", "did you mean vllm-qaic?"), ("x", "there are: vllm-qaic"), ("", "there are")],
)
def test_a_name_that_is_none_is_refused(name: str, hint: str) -> None:
    with pytest.raises(KvRenameError, match="no target is called") as raised:
        load_consumer(name)
    assert hint in str(raised.value)


@pytest.mark.usefixtures("pigeon")
def test_another_consumer_is_one_file(decoder: Path, run) -> None:
    assert list_consumers() == ("pigeon-post", "vllm-qaic")
    assert run(decoder, "--target", "pigeon-post", "-q") == (0, "", "")
    checked = run("check-consumer", decoder, "--target", "pigeon-post")
    assert checked.err == ""
    assert checked.out == f"{decoder}: pigeon-post takes 4 buffers, layers 0-1, all alike\n"
    assert run("check-consumer", decoder, "--target", "vllm-qaic").code == 1


@pytest.mark.usefixtures("pigeon")
def test_one_of_several_has_to_be_named(decoder: Path, run) -> None:
    outcome = run("check-consumer", decoder)
    assert outcome.code == 2
    assert "no --target given, one of: pigeon-post, vllm-qaic" in outcome.err


@pytest.mark.usefixtures("pigeon")
def test_what_goes_for_all_consumers_goes_for_it(decoder: Path, run) -> None:
    outcome = run("check-consumer", decoder, "--target", "pigeon-post")
    assert outcome.code == 1
    assert "error KV601: past_key.0 does not carry pigeon" in outcome.err
    assert "KV604" not in outcome.err
