from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
from models import node, saved

from onnxkvrename import Finding, KvRenameError, ModelError, ModelReport, load_rules
from onnxkvrename.report.documents.verify_json import DOCUMENT, describe_verified
from onnxkvrename.report.formats import Span, load_format
from onnxkvrename.report.formats.text import GREEN, RED
from onnxkvrename.report.verify_text import (
    build_verify_answer,
    format_buffer_flows,
    summarize_verdict,
)
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.verification.dataflow import BufferFlow
from onnxkvrename.verification.provenance import NodeLocation
from onnxkvrename.verification.verify import VerifiedModel, VerifyRequest, verify_model

PROFILE = ProfileChoice("qeff")
FAULT = Finding("KV110", "error", "past_key.0_RetainedState", "is wrong", "mend it")
DOUBT = Finding("KV113", "warning", "past_key.0_RetainedState", "is in doubt", "look at it")
HOSTILE = "a\n::error::b##[x]\x1b[2J\u202e\udcff"


@pytest.fixture
def sound(tmp_path: Path) -> VerifiedModel:
    """The decoder of one layer, here called m.onnx."""
    path = saved(models.decoder(), tmp_path / "m.onnx")
    verified = verify_model(path, load_rules(), VerifyRequest())
    return with_path(verified, "m.onnx")


def with_path(verified: VerifiedModel, path: str) -> VerifiedModel:
    return verified._replace(report=verified.report._replace(path=path))


def with_report(verified: VerifiedModel, *findings: Finding, **parts: object) -> VerifiedModel:
    return verified._replace(report=verified.report._replace(findings=findings, **parts))


def with_flows(verified: VerifiedModel, *flows: BufferFlow) -> VerifiedModel:
    """With other flows, each of the buffer in its place."""
    pairs = zip(flows, verified.flows, strict=True)
    return verified._replace(
        flows=tuple(flow._replace(pair=old_flow.pair) for flow, old_flow in pairs)
    )


def test_a_verdict_says_what_was_proved_and_how(sound: VerifiedModel) -> None:
    assert (
        summarize_verdict(sound)
        == "2 of 2 buffers retained by dataflow, layer 0, updated by Add; no token"
    )


def test_what_is_not_proved_is_not_counted(sound: VerifiedModel) -> None:
    first, second = sound.flows
    doubt = BufferFlow(first.pair, "untraced", NodeLocation("Mystery", ""), (), "no body")
    assert summarize_verdict(with_flows(sound, doubt, second)).startswith(
        "1 of 2 buffers retained by dataflow, "
    )
    assert "Mystery" not in summarize_verdict(with_flows(sound, doubt, second))
    through = BufferFlow(first.pair, "passed through")
    assert (
        summarize_verdict(with_flows(sound, through, through))
        == "0 of 2 buffers retained by dataflow, layer 0; no token"
    )


def test_operators_are_told_the_most_frequent_first(sound: VerifiedModel) -> None:
    three = sound._replace(flows=(sound.flows[0], sound.flows[1], sound.flows[1]))
    flows = [
        flow._replace(updated_by=NodeLocation(op, ""))
        for flow, op in zip(three.flows, "BAA", strict=True)
    ]
    assert summarize_verdict(three._replace(flows=tuple(flows))).endswith(
        "updated by A, B; no token"
    )


def test_a_model_with_an_error_does_not_verify(sound: VerifiedModel) -> None:
    assert summarize_verdict(with_report(sound, FAULT)) == "does not verify"
    assert summarize_verdict(with_report(sound, DOUBT)) == summarize_verdict(sound)


def test_a_model_without_buffers_says_so(sound: VerifiedModel) -> None:
    assert summarize_verdict(with_report(sound, pairs=())) == "no KV buffer"


@pytest.mark.parametrize(
    ("findings", "clause", "reasons", "style"),
    [
        ((), "2 of 2 buffers retained by dataflow", ", layer 0, updated by Add; no token", GREEN),
        ((FAULT,), "does not verify", "", RED),
    ],
)
def test_the_first_clause_of_a_verdict_is_green_or_red(
    sound: VerifiedModel, findings: tuple[Finding, ...], clause: str, reasons: str, style: str
) -> None:
    answer = build_verify_answer(
        [with_report(sound, *findings)], PROFILE, quiet=False, verbose=False
    )
    *_, line = answer.render_text(None)
    assert line.text == f"m.onnx: {clause}{reasons}"
    assert line.spans[2:4] == (Span(clause, style), Span(reasons))


def test_each_buffer_is_told_with_where_it_is_updated(sound: VerifiedModel) -> None:
    assert list(format_buffer_flows(sound)) == [
        f"past_{part}.0 -> past_{part}.0_RetainedState: updated by Add (write_{part}), "
        "written in place"
        for part in ("key", "value")
    ]
    first, second = sound.flows
    other = with_flows(
        sound,
        BufferFlow(first.pair, "untraced", NodeLocation("Mystery", "")),
        BufferFlow(second.pair, "passed through"),
    )
    assert [line.partition(": ")[2] for line in format_buffer_flows(other)] == [
        "untraced: Mystery",
        "passed through",
    ]


def with_hostile_names(verified: VerifiedModel) -> VerifiedModel:
    """With hostile text wherever there can be any."""
    first, second = verified.flows
    flows = (first._replace(updated_by=NodeLocation(HOSTILE, HOSTILE)), second)
    verified = with_report(
        with_path(verified, HOSTILE), DOUBT._replace(name=HOSTILE, message=HOSTILE)
    )
    return verified._replace(flows=flows)


def annotated(*models: VerifiedModel, quiet: bool = False) -> list[str]:
    """Return what GitHub gets."""
    answer = build_verify_answer(models, PROFILE, quiet=quiet, verbose=False)
    return [line.text for line in load_format("github").render(answer, None)]


def test_github_gets_findings_and_a_notice_for_each_model(sound: VerifiedModel) -> None:
    unread = VerifiedModel(ModelReport("x", "x", "failed", error=ModelError("no", path="x")))
    items = (with_report(sound, FAULT), with_report(sound, DOUBT), unread)
    lines = annotated(*items)
    assert lines == [
        "::error file=m.onnx,title=KV110::past_key.0_RetainedState is wrong (mend it)",
        "::notice file=m.onnx,title=verify::does not verify",
        "::warning file=m.onnx,title=KV113::past_key.0_RetainedState is in doubt (look at it)",
        f"::notice file=m.onnx,title=verify::{summarize_verdict(sound)}",
        "::error file=x,title=failed::x: no",
    ]
    assert annotated(*items, quiet=True) == [line for line in lines if "notice" not in line]


def test_hostile_text_gives_github_no_commands(sound: VerifiedModel) -> None:
    text = "\n".join(annotated(with_hostile_names(sound)))
    assert [line[: line.index(" ")] for line in text.split("\n")] == ["::warning", "::notice"]
    assert not set(text) & {"\x1b", "\u202e", "\r"}
    assert "##[" not in text


def test_json_has_a_verdict_for_each_pair(sound: VerifiedModel) -> None:
    item = with_report(sound, DOUBT)
    document = json.loads(DOCUMENT.render(describe_verified([item], PROFILE), 0))
    (model,) = document["models"]
    assert model["verified"] is True
    assert model["pairs"][0] == {
        "layer": 0,
        "buffer": "past_key",
        "kind": "attention",
        "scope": "",
        "input": "past_key.0",
        "output": "past_key.0_RetainedState",
        "verdict": "updated",
        "update": "inplace",
        "update_axis": None,
        "updated_by": {"op_type": "Add", "node": "write_key"},
    }
    assert {"name": "logits", "reason": "not retained"} in model["kept"]
    assert [found["code"] for found in model["findings"]] == ["KV113"]


def test_json_of_half_a_pair_and_of_a_model_unread_is_valid(tmp_path: Path) -> None:
    model = models.decoder(node("Neg", ["x"], ["y"]))
    model.graph.output.pop()
    half = verify_model(saved(model, tmp_path / "m.onnx"), load_rules(), VerifyRequest())
    unread = verify_model(tmp_path / "none.onnx", load_rules(), VerifyRequest())
    document = json.loads(DOCUMENT.render(describe_verified([half, unread], PROFILE), 2))
    (_, pair), nothing = (item["pairs"] for item in document["models"])
    assert (pair["output"], pair["verdict"], pair["updated_by"]) == (None, None, None)
    assert nothing == []
    assert [item["verified"] for item in document["models"]] == [False, False]
    assert document["models"][1]["error"]["message"] == "no such file"


def test_json_has_names_as_they_are_and_is_ascii(sound: VerifiedModel) -> None:
    text = DOCUMENT.render(describe_verified([with_hostile_names(sound)], PROFILE), 0)
    document = json.loads(text)
    assert text.isascii()
    assert document["models"][0]["path"] == HOSTILE
    assert document["models"][0]["pairs"][0]["updated_by"] == {"op_type": HOSTILE, "node": HOSTILE}


def test_json_of_a_job_that_could_not_be_done_is_valid() -> None:
    document = json.loads(DOCUMENT.render(DOCUMENT.empty, 2, KvRenameError("no", hint="mend")))
    assert document["error"] == {"message": "no", "path": None, "hint": "mend"}
    assert (document["models"], document["exit_code"]) == ([], 2)
