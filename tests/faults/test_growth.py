"""What hostile files cost: at most linear time and little memory, or a refusal in one line.

`bench/hostile.py` measures every command in processes of its own; here the same files are read
in this process, and small, so that the suite stays quick.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from faults import hostile_inputs
from faults.hostile_inputs import MODELS, Build, entry, tensor
from faults.hostile_texts import JSON_SIDECARS, LAYOUT_FILES
from tiers import thin

from onnxkvrename import KvRenameError, load_rules, rename_bytes
from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.layout.json import parse_layout
from onnxkvrename.model import occurrences, proto_reader, protobuf
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.kv_model import read_kv_model
from onnxkvrename.sidecars.tree import parse_json_tree
from onnxkvrename.verification.graph_bodies import read_graph
from onnxkvrename.verification.pairs.find_pairs import find_states
from onnxkvrename.verification.pairs.infer_rules import TracedModel, infer_rules

QEFF = load_rules()
NOISE = 0.02
"""Seconds of CPU below which growth is not judged."""
GROWTH = 2.3
SIZE = 1 << 12


def read_model(data: bytes) -> None:
    rename_bytes(data, "VLLM", rules=QEFF)


def read_pairs(data: bytes) -> None:
    source = ByteSource.from_bytes(data)
    graph = read_graph(source)
    signature = read_signature(source)
    infer_rules(TracedModel(Path("m.onnx"), signature, find_states(graph, signature).pairs))


def read_sidecar(data: bytes) -> None:
    parse_json_tree(data.decode())


def read_layout(data: bytes) -> None:
    parse_layout(data.decode(), "layout.json")


READERS: tuple[tuple[str, Callable[[bytes], None], dict[str, Build]], ...] = (
    ("model", read_model, MODELS),
    ("pairs", read_pairs, MODELS),
    ("json", read_sidecar, JSON_SIDECARS),
    ("layout", read_layout, LAYOUT_FILES),
)
CASES = [
    pytest.param(read, build, id=f"{kind}: {name}")
    for kind, read, builders in READERS
    for name, build in builders.items()
]


def measure(read: Callable[[bytes], None], data: bytes, runs: int = 1) -> float:
    """Return the least CPU time of some runs; a refusal is an answer as good as any."""
    best, refusal = float("inf"), ""
    for _ in range(runs):
        start = time.process_time()
        try:
            read(data)
        except (KvRenameError, UnreadableTextError) as error:
            refusal = str(error)
        best = min(best, time.process_time() - start)
    assert "\n" not in refusal
    return best


def grows_too_fast(read: Callable[[bytes], None], build: Build, size: int = SIZE) -> bool:
    """Return whether twice as much takes more than `GROWTH` times as long, time and again."""
    small, large = build(size), build(2 * size)
    limit = GROWTH * len(large) / len(small) / 2
    for runs in (1, 3, 7, 20):
        times = measure(read, small, runs), measure(read, large, runs)
        if times[1] <= max(NOISE, limit * times[0]):
            return False
    return True


@pytest.mark.parametrize(("read", "build"), thin(CASES, 50))
def test_the_time_for_a_hostile_file_is_linear(read: Callable[[bytes], None], build: Build):
    assert not grows_too_fast(read, build)


def test_a_reader_that_is_quadratic_would_be_noticed():
    def read_all_again(data: bytes) -> None:
        for end in range(0, len(data), 64):
            sum(data[:end:4])

    assert grows_too_fast(read_all_again, bytes, 5 << 13)


LARGE = (
    *("unknown texts", "unknown groups", "huge packed dims"),
    *("inputs of a node", "fields of an input"),
)


@pytest.mark.parametrize("name", thin(LARGE, 1))
def test_small_records_take_little_memory(name: str):
    data = MODELS[name](1 << 16)
    tracemalloc.start()
    try:
        measure(read_model, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5e6 + 4 * len(data)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("inputs", "has more than 1,000 graph inputs or outputs, at byte "),
        ("opset_import", "has more than 1,000 fields in a message, at byte 0"),
        ("external entries", "has more than 1,000 fields in a message, at byte "),
        ("graph groups", "has more than 1,000 groups in a message, at byte "),
        ("unknown groups", "has more than 1,000 groups in a message, at byte "),
        ("dims of 1", "has more than 256 dimensions in a shape, at byte "),
        ("huge packed dims", "has more than 256 dimensions in a tensor, at byte "),
        ("graphs of a buffer", "has more than 1,000 occurrences of KV buffers' names, at byte "),
        ("outputs of a node", "has more than 1,000 occurrences of KV buffers' names, at byte "),
    ],
)
def test_a_limit_is_named_with_its_place(name: str, said: str, monkeypatch: pytest.MonkeyPatch):
    for module in (protobuf, proto_reader, occurrences):
        monkeypatch.setattr(module, "MAX_ENTRIES", 1000)
    with pytest.raises(KvRenameError) as caught:
        read_model(MODELS[name](1 << 16))
    assert said in str(caught.value)
    assert "please report it" in str(caught.value)


def test_the_buffers_of_a_model_are_limited():
    with pytest.raises(KvRenameError, match=r"has more than 4,096 KV buffers \(the last is past_k"):
        read_model(MODELS["layers without shapes"](1 << 17))


@pytest.mark.parametrize(
    "name", ["graph texts", "graph fields", "fields with long tags", "spare bytes"]
)
def test_fields_that_nobody_needs_are_skipped_many_at_a_time(name: str):
    data = MODELS[name](1 << 16)
    source = ByteSource.from_bytes(data)
    read_signature(source)
    assert source.small_field_count < 1000


def test_the_types_of_values_are_read_once_each(monkeypatch: pytest.MonkeyPatch):
    read = Mock(side_effect=proto_reader._read_type)
    monkeypatch.setattr(proto_reader, "_read_type", read)
    read_signature(ByteSource.from_bytes(MODELS["typed inputs"](1 << 14)))
    assert read.call_count == 2


@pytest.mark.parametrize(
    "location", [lambda n: f"w{n}", lambda n: "./" * n + "w.bin"], ids=["missing", "spellings"]
)
def test_data_files_that_are_not_there_are_looked_for_some_time_only(
    location: Callable[[int], str], tmp_path: Path
):
    tensors = b"".join(tensor(entry("location", location(n))) for n in range(1100))
    model = tmp_path / "m.onnx"
    model.write_bytes(hostile_inputs.model(tensors))
    (tmp_path / "w.bin").write_bytes(bytes(64))
    with pytest.raises(KvRenameError) as caught:
        read_kv_model(model, QEFF)
    assert "has more than 1,024 data files that are missing" in str(caught.value)
    assert "m.onnx" in str(caught.value)
