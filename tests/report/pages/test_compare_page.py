"""The page of a hand-off without a browser: it says what the comparison decided, inertly."""

from __future__ import annotations

import json
import re

import pytest
from handoff_pages import SIZED, Reader, compare_window, find_class, render, render_length
from handoff_sides import (
    CONSUMER,
    build_side,
    build_side_layout,
    describe_attention,
    draw_sides,
    predict_handoff,
    transfer_bytes,
)
from tiers import thin

from onnxkvrename.findings import build_finding
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.layout.layout import Shape
from onnxkvrename.model.signature import Value
from onnxkvrename.report.compare_text import format_handoff_verdict
from onnxkvrename.report.pages import compare as compare_module


def test_the_page_says_what_the_comparison_says() -> None:
    handoff = compare_window(**SIZED)
    page = Reader(render(handoff))
    sentence = format_handoff_verdict(handoff)
    assert sentence[1:] in page.text
    for finding in handoff.findings:
        assert f"{finding.severity} {finding.code}" in page.text
        for text in (finding.name, finding.message, finding.hint):
            assert text in page.text
        assert f"onnxkvrename explain {finding.code}" in page.text


def test_the_first_length_is_the_first_that_goes_wrong() -> None:
    page = Reader(render(compare_window(**SIZED)))
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
        "shifted for prompts longer than 128 tokens",
    ]
    assert page.rows[2][1] == "2,064 written, 2,048 read"


def test_both_sides_are_below_the_title_with_sizes_and_bytes() -> None:
    page = Reader(render(compare_window(**SIZED)))
    text = " ".join(page.text.split())
    assert "ctx_len=4096, sliding_window=128" in text
    assert "96 bytes for each token; 384 KiB (393,216 bytes) for a sequence" in text
    assert "64 bytes for each token; 32 bytes more for each token in a window; 260 KiB" in text


def test_findings_come_before_the_table_which_can_be_long() -> None:
    page = Reader(render(compare_window(**SIZED)))
    assert page.text.index("error KV614") < page.text.index("For a prompt of")


@pytest.mark.parametrize(
    ("paths", "heading"),
    [
        (("prefill.onnx", "decode.onnx"), "prefill.onnx to decode.onnx"),
        (("/disk/" + "x/" * 40 + "a/m.onnx", "/disk/" + "x/" * 40 + "b/m.onnx"),
         "…/a/m.onnx to …/b/m.onnx"),
        (("/disk/" + "x/" * 40 + "m.onnx",) * 2, "…/m.onnx to …/m.onnx"),
        (("C:\\" + "x\\" * 40 + "a.onnx", "C:\\" + "x\\" * 40 + "b.onnx"),
         "…/a.onnx to …/b.onnx"),
        (("a" * 40 + "b" * 40, "/c"), f"{'a' * 24}…{'b' * 23} to /c"),
    ],
)  # fmt: skip
def test_a_heading_tells_two_long_paths_apart(paths: tuple[str, str], heading: str) -> None:
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    prefill, decode = (layout._replace(models=(path,)) for path in paths)
    document = render(predict_handoff(prefill, decode))
    assert f"<title>Hand-off from {heading}</title>" in document
    for path in paths:
        assert path in Reader(document).text  # whole, below


def test_the_command_of_a_hint_is_code() -> None:
    plain = build_side_layout(*describe_attention(0), token="", ctx_len=64)
    document = render(predict_handoff(plain, plain))
    hint = predict_handoff(plain, plain).findings[0].hint
    assert hint.count("`") == 2
    assert f"<code>{hint.strip('`')}</code>" in document


def test_of_a_refused_prompt_nothing_is_fine() -> None:
    page = Reader(render(compare_window(prefill_window=True, **SIZED)))
    assert page.texts["outcome"].startswith("refused")
    assert set(page.kinds) == {"none"}
    slots = [attributes for tag, attributes in page.elements if "slot" in find_class(attributes)]
    assert len(slots) == 12
    assert all("none" in find_class(attributes) for attributes in slots)


def test_without_the_token_nothing_is_transferred_and_the_page_says_when_it_would_be() -> None:
    plain = build_side_layout(*describe_attention(0), token="", ctx_len=64)
    page = Reader(render(predict_handoff(plain, plain)))
    assert "Nothing is transferred now" in page.text
    assert {row[4] for row in page.rows} == {"○ not transferred; after a rename: correct"}
    assert "✓ correct" not in [cell for row in page.rows for cell in row]
    assert any("conditional" in find_class(each) for _, each in page.elements)


def test_only_the_side_without_the_token_is_said_to_be_renamed() -> None:
    plain, named = (
        build_side_layout(*describe_attention(0), token=token, ctx_len=4096)
        for token in ("", "vllmKvCache")
    )
    page = render(predict_handoff(plain, named))
    assert "selects nothing on prefill. What follows holds after a rename." in page
    both = render(predict_handoff(plain, plain))
    assert "selects nothing on prefill and decode. What follows holds after a rename." in both


def test_what_cannot_be_decided_is_not_drawn() -> None:
    known = build_side_layout(*describe_attention(0, shape="2,sliding_window,4"), sliding_window=9)
    other = build_side_layout(*describe_attention(0, shape="2,sliding_window,4"))
    document = render(predict_handoff(known, other))
    page = Reader(document)
    assert not any("slot" in find_class(attributes) for _, attributes in page.elements)
    assert {row[1] for row in page.rows} == {"depends on sizes (KV614)"}
    assert "<script" not in document
    assert "no memory is drawn" in page.text


def test_a_side_without_buffers_has_a_page_as_well() -> None:
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    page = Reader(render(predict_handoff(layout, layout._replace(buffers=()))))
    assert "a side has no KV buffer" in page.text
    assert "KV001" in page.text
    assert page.rows == []


def test_arrays_have_positions() -> None:
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    handoff = predict_handoff(layout, layout, consumer=load_consumer("qefficient"))
    page = Reader(render(handoff))
    assert [row[2:4] for row in page.rows] == [["array 0"] * 2, ["array 1"] * 2]


def test_findings_of_a_broken_model_are_listed_with_its_side() -> None:
    finding = build_finding(
        "KV110", "past_key.0_RetainedState", "is not computed from it", "export"
    )
    page = Reader(render(compare_window(**SIZED), findings=(finding,)))
    assert "In prefill itself" in page.text
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
    document = render(predict_handoff(*sides))
    plain = Reader(render(handoff))
    page = Reader(document)
    parts = [[tag for tag, _ in each.elements if tag != "wbr"] for each in (page, plain)]
    assert parts[0] == parts[1]
    assert "past_key.0_vllmKvCache</script><script>alert(1)" in page.rows[0][0]
    assert "<b>model</b>\\x1b[2J.onnx" in page.text
    assert not re.search("[\u202e\u2028\x1b]", document)
    assert json.loads(page.texts["data"])["lengths"][-1] == 4096


def test_every_control_has_a_name_and_the_table_its_semantics() -> None:
    page = Reader(render(compare_window(**SIZED)))
    labels = {each.get("for") for tag, each in page.elements if tag == "label"}
    controls = {each["id"] for tag, each in page.elements if tag in ("input", "select")}
    assert labels == {"slider", "number", "zoom", None}  # one is around its control
    assert controls == {"slider", "number", "zoom", "failing"}
    roles = [each.get("role") for _, each in page.elements]
    assert roles.count("listbox") == 2
    assert roles.count("option") == 12
    described = [each for _, each in page.elements if each.get("role") == "option"]
    assert {each["aria-describedby"] for each in described} == {"detail"}
    scopes = [each.get("scope") for tag, each in page.elements if tag == "th"]
    assert scopes == ["col"] * 4 + ["row"] * 2 + ["col"] * 6 + ["row"] * 6
    outcome = next(each for _, each in page.elements if each.get("id") == "outcome")
    assert outcome["role"] == "status"


def test_two_runs_make_the_same_page() -> None:
    assert render(compare_window(**SIZED)) == render(compare_window(**SIZED))


def test_a_page_of_too_many_buffers_lists_the_wrong_ones_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_module, "_MAX_ROWS", 4)
    document = render(compare_window(**SIZED))
    page = Reader(document)
    assert "6 buffers are too many to draw" in page.text
    assert ["longer than 128" in row[1] for row in page.rows] == [True] * 4
    assert "<script" not in document


@pytest.mark.parametrize("tokens", [1, 128, 129, 4096])
def test_any_length_can_be_shown(tokens: int) -> None:
    page = Reader(render_length(compare_window(**SIZED), tokens))
    assert page.kinds.count("wrong") == (4 if tokens > 128 else 0)


# What the script computes from the data, at every length.


class Data:
    """The data of a page for the script, and what it makes of them for a prompt."""

    def __init__(self, handoff: Handoff) -> None:
        page = Reader(render(handoff))
        data = json.loads(page.texts["data"])
        self._lengths, self._outcomes = data["lengths"], data["outcomes"]
        self._tracks, self._rows = data["tracks"], data["rows"]
        self._names = [re.split("FLOAT|INT8|prefill:", row[0])[0] for row in page.rows]

    def find(self, tokens: int) -> int:
        """The index of the longest length that is not longer than the prompt."""
        return max(at for at, length in enumerate(self._lengths) if length <= tokens)

    def read_outcome(self, tokens: int) -> str:
        return str(self._outcomes[self.find(tokens)][0])

    def read_states(self, tokens: int) -> dict[str, str]:
        states = [states[self.find(tokens)] for _, states, _ in self._rows]
        return dict(zip(self._names, states, strict=True))

    def compute_sizes(self, side: int, tokens: int) -> list[float]:
        at = self.find(tokens)
        start = self._lengths[at]
        if tokens == start:
            return [sizes[at] for _, _, sizes in self._tracks[side]]
        share = (tokens - start) / (self._lengths[at + 1] - start)
        return [
            sizes[at] + (sizes[at + 1] - sizes[at]) * share for _, _, sizes in self._tracks[side]
        ]


@pytest.mark.parametrize("full_transfer", [False, True])
@pytest.mark.parametrize("seeds", thin([range(1, 4), range(4, 40)], 1))
def test_every_length_has_the_bytes_and_states_of_a_real_transfer(
    seeds: range, full_transfer: bool
) -> None:
    for seed in seeds:
        prefill, decode = draw_sides(seed)
        handoff = predict_handoff(prefill, decode, full_transfer=full_transfer)
        setup, data = handoff.comparison.setup, Data(handoff)
        never_begins = any(finding.code == "KV604" for finding in handoff.findings)
        for tokens in range(1, min(setup.longest_prompt, 12) + 1):
            for side, slots in enumerate(
                (setup.build_prefill_slots(tokens), setup.build_decode_slots(tokens))
            ):
                found = data.compute_sizes(side, tokens)
                assert found == pytest.approx([slot.nbytes for slot in slots]), (seed, tokens)
            truth = transfer_bytes(prefill, decode, tokens, full_transfer=full_transfer)
            states = data.read_states(tokens)
            if never_begins or truth.refused:
                assert {*states.values(), data.read_outcome(tokens)} == {"none"}, (seed, tokens)
            else:
                wrong = {name for name, state in states.items() if state == "wrong"}
                assert wrong == truth.wrong, (seed, tokens)
                assert (data.read_outcome(tokens) == "wrong") == bool(wrong)


def test_what_is_not_handed_over_is_not_drawn_as_correct() -> None:
    prefill = build_side_layout(*describe_attention(0, 1, 2), ctx_len=64)
    decode = build_side_layout(*describe_attention(0, 1), ctx_len=64)
    page = Reader(render(predict_handoff(prefill, decode)))
    assert page.kinds == ["correct"] * 4 + ["none"] * 2
    silent = decode._replace(outputs=decode.outputs[1:])  # without logits, prefill fails
    page = Reader(render(predict_handoff(silent, decode)))
    assert set(page.kinds) == {"none"}
    assert page.texts["outcome"] == "fails at the first prompt (KV604)"


def test_of_a_broken_model_nothing_is_known_to_be_fine() -> None:
    layout = build_side_layout(*describe_attention(0, 1), ctx_len=64)
    finding = build_finding("KV110", "past_key.0", "is not computed from its input", "export it")
    prefill, decode = (build_side(label, layout) for label in ("prefill", "decode"))
    handoff = compare_sides(prefill._replace(model_finding=finding), decode, CONSUMER)
    page = Reader(render(handoff))
    assert set(page.kinds) == {"unknown"}
    assert {row[5] for row in page.rows} == {"cannot decide (KV110)"}


@pytest.mark.parametrize(
    ("prefill_sizes", "gap"),
    [
        ({}, "For longer prompts the bytes depend on a window: --dim sliding_window=SIZE"),
        ({"sliding_window": 128}, "The graphs do not limit the prompt: shown up to 4,096"),
    ],
)
def test_lengths_that_are_not_shown_have_a_reason(prefill_sizes: dict[str, int], gap: str) -> None:
    page = Reader(render(compare_window(**prefill_sizes)))
    assert gap in page.text


def test_a_consumer_that_rounds_is_shown_for_one_token() -> None:
    def round_up(shape: Shape, tokens: int | None) -> Shape:
        cut = CONSUMER.transferred_shape(shape, tokens)
        rounded = [-(-int(str(cut[2])) // 16) * 16]
        return (*cut[:2], *rounded, *cut[3:])

    consumer = CONSUMER._replace(transferred_shape=round_up)
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    page = Reader(render(predict_handoff(layout, layout, consumer=consumer)))
    assert "do not grow evenly" in page.text
    assert page.texts["length"] == "1 token"
