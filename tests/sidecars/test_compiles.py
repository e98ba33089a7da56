"""specializations.json: sizes of symbols."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import ModelError
from onnxkvrename.sidecars.compiles import Specializations, parse_specializations

REAL = Path(__file__).resolve().parents[3] / "shared" / "exports" / "llama2l"


def read(*entries: Any) -> Specializations:
    return parse_specializations(json.dumps({"specializations": entries}), "s.json")


def test_sizes_that_all_agree_on_and_those_that_differ() -> None:
    prefill = {"name": "Prefill", "symbols": {"batch_size": "1", "ctx_len": "32", "seq_len": "8"}}
    decode = {"name": "Decode", "symbols": {"batch_size": "1", "ctx_len": "32", "seq_len": "1"}}
    found = read(prefill, decode)
    assert found.sizes == {"batch_size": 1, "ctx_len": 32}
    assert found.conflicting_sizes == {"seq_len": (8, 1)}


def test_the_older_form_lists_the_symbols_themselves() -> None:
    found = read({"batch_size": "4", "ctx_len": 128, "_graph_name": "Prefill"})
    assert found == ({"batch_size": 4, "ctx_len": 128}, {})


def test_a_symbol_that_only_one_has_is_known() -> None:
    assert read({"symbols": {"a": "1"}}, {"symbols": {"b": "2"}}).sizes == {"a": 1, "b": 2}


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real exports: {REAL} is not there")
@pytest.mark.parametrize("kind", ["plain", "VLLM"])
def test_a_real_file_is_read(kind: str) -> None:
    path = REAL / f"compile-{kind}" / "specializations.json"
    found = parse_specializations(path.read_text("utf-8"), str(path))
    assert found.sizes == {"batch_size": 1, "ctx_len": 32}
    assert found.conflicting_sizes == {"seq_len": (8, 1)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "100 levels"),
        ("[]", "no list of"),
        ("{}", "no list of"),
        ('{"specializations": []}', "no list of"),
        ('{"specializations": {}}', "no list of"),
        ('{"specializations": [1]}', "without symbols"),
        ('{"specializations": [{"symbols": []}]}', "without symbols"),
        *(
            (f'{{"specializations": [{{"symbols": {{"ctx_len": {size}}}}}]}}', "has ctx_len as")
            for size in ('"many"', "-1", "true", "1.5", "null", '""', '"٣"', '"1' + "0" * 18 + '"')
        ),
        (
            '{"specializations": [{"symbols": {"a": ' + "1" * 5000 + "}}]}",
            "too many digits",
        ),
    ],
)
def test_another_form_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ModelError) as error:
        parse_specializations(text, "s.json")
    assert str(error.value).startswith("s.json: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_size_that_is_no_size_is_shown_in_short() -> None:
    with pytest.raises(ModelError) as error:
        read({"symbols": {"ctx_len": ["x" * 10_000]}})
    assert len(str(error.value)) < 300
