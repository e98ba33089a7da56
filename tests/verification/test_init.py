from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import FIXTURES
from models import KEY_OUT, VALUE_OUT, decoder
from tiers import thin

from onnxkvrename import ModelError, load_rules
from onnxkvrename.errors import ReadError
from onnxkvrename.model.file import read_model_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.plan import build_minimal_plan
from onnxkvrename.verification import trace_buffer_updates

MODEL = FIXTURES / "VLLM" / "control_flow.onnx"
RAW = decoder().SerializeToString()
PAIRS = build_minimal_plan(read_model_signature(ByteSource.from_bytes(RAW)), load_rules()).pairs


def test_each_retained_output_has_its_update():
    updates = trace_buffer_updates(ByteSource.from_bytes(RAW), PAIRS)
    assert set(updates) == {KEY_OUT, VALUE_OUT}


@pytest.mark.parametrize(("error", "is_answer"), [(ModelError, True), (ReadError, False)])
def test_a_file_that_cannot_be_read_is_not_a_model_that_cannot_be_parsed(
    error: type[ModelError], is_answer: bool
):
    def read(offset: int, size: int) -> bytes:
        raise error("does not work")

    source = ByteSource(read, len(RAW))
    if is_answer:
        assert trace_buffer_updates(source, PAIRS) == {}
    else:
        with pytest.raises(ReadError):
            trace_buffer_updates(source, PAIRS)


@pytest.mark.parametrize(
    "words",
    thin([["inspect"], ["inspect", "--vllm"], ["pairs"]], 1),
    ids=lambda words: words[0],
)
def test_how_buffers_are_updated_is_read_without_onnx(words: list[str]) -> None:
    script = (
        "import sys; from onnxkvrename.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(' '.join({'onnx', 'numpy', 'google.protobuf'} & sys.modules.keys()) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script, *words, MODEL], capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")
