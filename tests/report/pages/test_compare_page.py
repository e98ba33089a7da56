"""The page of a hand-off without a browser: it says what the comparison decided, inertly."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from handoff_pages import SIZED, Reader, compare_window, find_class
from handoff_sides import build_side_layout, describe_attention, predict_handoff

from onnxkvrename.findings import build_finding
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.model.signature import Value
from onnxkvrename.report.compare_text import format_handoff_verdict
from onnxkvrename.report.pages.compare_page import render_handoff_page
from onnxkvrename.rules.results import ModelReport


def read_data(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Reader(page).texts["data"])
    return data


def test_the_page_says_what_the_comparison_says() -> None:
    handoff = compare_window(**SIZED)
    page = Reader(render_handoff_page(handoff))
    sentence = format_handoff_verdict(handoff)
    assert sentence[1:] in page.text
    for finding in handoff.findings:
        assert f"{finding.severity} {finding.code}" in page.text
        for text in (finding.name, finding.message, finding.hint):
            assert text in page.text
        assert f"onnxkvrename explain {finding.code}" in page.text


def test_the_first_length_is_the_first_that_goes_wrong() -> None:
    page = Reader(render_handoff_page(compare_window(**SIZED)))
    assert page.texts["length"] == "129 tokens"
    assert page.texts["outcome"] == "4 of 6 buffers wrong (KV614)"
    assert page.kinds == ["correct"] * 2 + ["wrong"] * 4
    name, *cells = page.rows[4]
    assert name.startswith("past_key.2_vllmKvCache")
    assert cells == [
        "2,064",
        "byte 8,256",
        "byte 8,224",
        "✕ wrong",
        "prefill wrote it to other bytes: a window on one side, the whole context on the other "
        "(KV614)",
        "shifted for prompts longer than 128 tokens",
    ]
    assert page.rows[2][1] == "2,064 written, 2,048 read"


def test_the_table_has_a_cause_only_if_something_can_go_wrong() -> None:
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    for consumer in ("vllm-qaic", "qefficient"):
        handoff = predict_handoff(layout, layout, consumer=load_consumer(consumer))
        page = Reader(render_handoff_page(handoff))
        assert "Cause" not in page.text
        assert page.rows[0][4:] == ["✓ correct", "ok"]
    page = Reader(render_handoff_page(compare_window(**SIZED), tokens=1))
    assert "Cause" in page.text  # of longer prompts
    assert page.rows[2][4:6] == ["✓ correct", ""]


def test_findings_come_before_the_table_which_can_be_long() -> None:
    page = Reader(render_handoff_page(compare_window(**SIZED)))
    assert page.text.index("error KV614") < page.text.index("For a prompt of")


@pytest.mark.parametrize(
    ("paths", "heading"),
    [
        (("prefill.onnx", "decode.onnx"), "prefill.onnx to decode.onnx"),
        (("/work/" + "x/" * 40 + "a/m.onnx", "/work/" + "x/" * 40 + "b/m.onnx"),
         "…/a/m.onnx to …/b/m.onnx"),
        (("/work/" + "x/" * 40 + "m.onnx",) * 2, "…/m.onnx to …/m.onnx"),
        (("C:\\" + "x\\" * 40 + "a.onnx", "C:\\" + "x\\" * 40 + "b.onnx"),
         "…/a.onnx to …/b.onnx"),
        (("a" * 40 + "b" * 40, "/c"), f"{'a' * 24}…{'b' * 23} to /c"),
    ],
)  # fmt: skip
def test_a_heading_tells_two_long_paths_apart(paths: tuple[str, str], heading: str) -> None:
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    prefill, decode = (layout._replace(models=(path,)) for path in paths)
    document = render_handoff_page(predict_handoff(prefill, decode))
    assert f"<title>Hand-off from {heading}</title>" in document
    for path in paths:
        assert path in Reader(document).text  # whole, below


def test_the_command_of_a_hint_is_code() -> None:
    plain = build_side_layout(*describe_attention(0), token="", ctx_len=64)
    document = render_handoff_page(predict_handoff(plain, plain))
    hint = predict_handoff(plain, plain).findings[0].hint
    assert hint.count("`") == 2
    assert f"<code>{hint.strip('`')}</code>" in document


def test_a_length_that_was_asked_for_is_shown_first() -> None:
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    page = Reader(render_handoff_page(predict_handoff(layout, layout, tokens=(999, 20))))
    assert page.texts["length"] == "20 tokens"
    assert page.kinds == ["correct", "correct"]


def test_of_a_refused_prompt_nothing_is_fine() -> None:
    page = Reader(render_handoff_page(compare_window(prefill_window=True, **SIZED)))
    assert page.texts["outcome"].startswith("refused")
    assert set(page.kinds) == {"none"}
    slots = [attributes for tag, attributes in page.elements if "slot" in find_class(attributes)]
    assert len(slots) == 12
    assert all("none" in find_class(attributes) for attributes in slots)


def test_without_the_token_nothing_is_transferred_and_the_page_says_when_it_would_be() -> None:
    plain = build_side_layout(*describe_attention(0), token="", ctx_len=64)
    page = Reader(render_handoff_page(predict_handoff(plain, plain)))
    assert "Nothing is transferred now" in page.text
    assert {row[4] for row in page.rows} == {"○ not transferred; after a rename: correct"}
    assert "✓ correct" not in [cell for row in page.rows for cell in row]
    assert "conditional" in " ".join(
        find_class(each)[0] for _, each in page.elements if each.get("class")
    )


def test_only_the_side_without_the_token_is_said_to_be_renamed() -> None:
    plain, named = (
        build_side_layout(*describe_attention(0), token=token, ctx_len=4096)
        for token in ("", "vllmKvCache")
    )
    page = render_handoff_page(predict_handoff(plain, named))
    assert "What follows holds after prefill is renamed." in page
    both = render_handoff_page(predict_handoff(plain, plain))
    assert "What follows holds after both sides are renamed." in both


def test_the_longest_prompt_is_written_as_in_the_field_beside_it() -> None:
    side = build_side_layout(*describe_attention(0), ctx_len=4096)
    page = render_handoff_page(predict_handoff(side, side))
    assert "<span>of 4096</span>" in page


def test_what_cannot_be_decided_is_not_drawn() -> None:
    known = build_side_layout(*describe_attention(0, shape="2,sliding_window,4"), sliding_window=9)
    other = build_side_layout(*describe_attention(0, shape="2,sliding_window,4"))
    document = render_handoff_page(predict_handoff(known, other))
    page = Reader(document)
    assert not any("slot" in find_class(attributes) for _, attributes in page.elements)
    assert {row[4] for row in page.rows} == {"? unknown"}
    assert all("(KV614)" in row[5] for row in page.rows)
    assert "<script" not in document
    assert "no memory is drawn" in page.text


def test_a_side_without_buffers_has_a_page_as_well() -> None:
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    page = Reader(render_handoff_page(predict_handoff(layout, layout._replace(buffers=()))))
    assert "a side has no KV buffer" in page.text
    assert "KV001" in page.text
    assert page.rows == []


def test_arrays_have_positions() -> None:
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    handoff = predict_handoff(layout, layout, consumer=load_consumer("qefficient"))
    page = Reader(render_handoff_page(handoff))
    assert [row[2:4] for row in page.rows] == [["array 0"] * 2, ["array 1"] * 2]


def test_findings_of_a_broken_model_are_listed_with_its_path() -> None:
    finding = build_finding(
        "KV110", "past_key.0_RetainedState", "is not computed from it", "export"
    )
    report = ModelReport("broken.onnx", "broken.onnx", "failed", findings=(finding,))
    page = Reader(render_handoff_page(compare_window(**SIZED), [report]))
    assert "In broken.onnx:" in page.text
    assert "is not computed" in page.text


HOSTILE = (
    "past_key.0_vllmKvCache</script><script>alert(1)</script>\u202e\u2028<img src=x onerror=y>'\""
)


def test_hostile_names_are_text_wherever_they_are() -> None:
    handoff = compare_window(**SIZED)
    sides = []
    for side in (handoff.prefill, handoff.decode):
        layout = side.layout
        first = layout.buffers[0]

        def rename(value: Value, old: str | None = first.input) -> Value:
            return value._replace(name=HOSTILE) if value.name == old else value

        sides.append(
            layout._replace(
                models=("<b>model</b>\x1b[2J.onnx",),
                inputs=tuple(map(rename, layout.inputs)),
                buffers=(first._replace(input=HOSTILE, part="<key>"), *layout.buffers[1:]),
            )
        )
    document = render_handoff_page(predict_handoff(*sides))
    plain = Reader(render_handoff_page(handoff))
    page = Reader(document)
    parts = [tag for tag, each in page.elements if each.get("class") != "part"]
    assert parts == [tag for tag, _ in plain.elements]
    assert "past_key.0_vllmKvCache</script><script>alert(1)" in page.rows[0][0]
    assert "<b>model</b>\\x1b[2J.onnx" in page.text
    assert not re.search("[\u202e\u2028\x1b]", document)
    assert read_data(document)["last"] == 4096


def test_nothing_is_loaded_and_nothing_runs_but_its_own_script() -> None:
    document = render_handoff_page(compare_window(**SIZED))
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|https?:|@import|url\((?!#)", document) == []
    page = Reader(document)
    attributes = {name for _, each in page.elements for name in each}
    assert not {name for name in attributes if name.startswith("on")} | ({"style"} & attributes)


def test_every_control_has_a_name_and_the_table_its_semantics() -> None:
    page = Reader(render_handoff_page(compare_window(**SIZED)))
    labels = {each.get("for") for tag, each in page.elements if tag == "label"}
    controls = {each["id"] for tag, each in page.elements if tag in ("input", "select")}
    assert labels == {"slider", "number", "zoom", None}  # one is around its control
    assert controls == {"slider", "number", "zoom", "failing"}
    roles = [each.get("role") for _, each in page.elements]
    assert roles.count("row") == 7
    assert roles.count("listbox") == 2
    assert roles.count("option") == 12
    described = [each for _, each in page.elements if each.get("role") == "option"]
    assert {each["aria-describedby"] for each in described} == {"detail"}
    scopes = [each.get("scope") for tag, each in page.elements if tag == "th"]
    assert scopes == ["col"] * 7 + ["row"] * 6
    outcome = next(each for _, each in page.elements if each.get("id") == "outcome")
    assert outcome["role"] == "status"


def test_two_runs_make_the_same_page() -> None:
    assert render_handoff_page(compare_window(**SIZED)) == render_handoff_page(
        compare_window(**SIZED)
    )


def test_the_size_of_a_page_is_limited() -> None:
    layout = build_side_layout(*describe_attention(*range(310)), ctx_len=4096)
    page = render_handoff_page(predict_handoff(layout, layout))
    assert len(Reader(page).rows) <= 300
    assert len(page) < 300 * 2048 + 40_000


@pytest.mark.parametrize("tokens", [1, 128, 129, 4096])
def test_any_length_can_be_shown(tokens: int) -> None:
    page = Reader(render_handoff_page(compare_window(**SIZED), tokens=tokens))
    assert page.kinds.count("wrong") == (4 if tokens > 128 else 0)
