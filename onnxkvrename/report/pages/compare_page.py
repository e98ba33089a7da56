"""A page on a hand-off: the memory of both sides for a prompt of any length, in a browser.

Python writes every element and every name of the page, for one length. The script only changes
numbers, states and positions in it; what it needs for other lengths is in a JSON element: sizes as
straight lines, states by length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from onnxkvrename.findings import Finding
from onnxkvrename.handoff.compare import Handoff
from onnxkvrename.handoff.slots import format_token_count
from onnxkvrename.handoff.worker import HandoffSide
from onnxkvrename.report.compare_text import (
    format_handoff_verdict,
    list_sides_without_token,
    resolve_outcome,
)
from onnxkvrename.report.inert import escape_text, shorten_text
from onnxkvrename.report.pages.buffer_states import StateKind
from onnxkvrename.report.pages.elements import Child, Value, build, build_data, cut_middle, isolate
from onnxkvrename.report.pages.fold_rows import fold_rows
from onnxkvrename.report.pages.frame import Color, write_color_variables, write_page
from onnxkvrename.report.pages.memory_map import MemoryMap, build_memory_map
from onnxkvrename.report.pages.memory_view import MARKS, MemoryView
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.storage.read import read_text_file

_SOURCES = Path(__file__).parent
_COLORS = {
    "even": Color("#b6d4f7", "#1f4b7d"),
    "odd": Color("#dbe9fb", "#163557"),
    "wrong": Color("#ffd3d0", "#6d2126"),
    "gap": Color("#eceff2", "#22272e"),
}
_MAX_TITLE_NAME = 48
_MAX_FINDINGS = 200
_MAX_TEXT = 1500
_MAX_JUMPS = 16
_ZOOMS = (1, 2, 4, 8, 16, 32, 64)
_VERDICT_KINDS: dict[str, StateKind] = {
    "works": "correct",
    "corrupts": "wrong",
    "fails": "none",
    "loses": "none",
    "unknown": "unknown",
}
_MEMORY_TEXTS = {
    "shared": "one piece of memory, in which each side counts offsets by itself",
    "separate": "an array for each buffer, by position",
}


def render_handoff_page(
    handoff: Handoff, failed_models: Sequence[ModelReport] = (), tokens: int | None = None
) -> str:
    """Return the page.

    It has at most 2,000 rows of about 2 kB, however many buffers there are: of more than 600,
    neighbors that are alike share a row.

    Args:
        handoff: The result of a comparison.
        failed_models: The models with an error of their own, which the page lists as well.
        tokens: The prompt length that the page shows at first; by default the first that was
            asked for, else the shortest that does not work, else the longest.
    """
    memory_map = fold_rows(build_memory_map(handoff))
    shown = _choose_length(handoff, memory_map, tokens)
    condition = "after a rename" if handoff.has_token and list_sides_without_token(handoff) else ""
    view = MemoryView(memory_map, shown, handoff.memory, condition)
    prefill, decode = _name_sides(_find_path(handoff.prefill), _find_path(handoff.decode))
    style = write_color_variables(_COLORS) + read_text_file(_SOURCES / "compare.css")
    return write_page(
        f"Hand-off from {prefill} to {decode}",
        command="compare",
        introduction=_build_introduction(handoff),
        body=_build_body(handoff, failed_models, view),
        style=style,
        script=read_text_file(_SOURCES / "compare.js") if memory_map.is_drawn else "",
    )


def _choose_length(handoff: Handoff, memory_map: MemoryMap, tokens: int | None) -> int:
    lengths = handoff.requested_lengths if tokens is None else (tokens,)
    shown = [length for length in lengths if 1 <= length <= memory_map.last]
    failing = [each.first for each in memory_map.outcomes if each.kind != "correct"]
    return next(iter((*shown, *failing, memory_map.last)))


def _find_path(side: HandoffSide) -> str:
    return side.path or (side.original_layout.models or (side.label,))[0]


def _name_sides(prefill: str, decode: str) -> tuple[str, str]:
    """Return both paths for the heading: of long ones without the folders that they share."""
    names = [escape_text(path) for path in (prefill, decode)]
    if max(map(len, names)) > _MAX_TITLE_NAME:
        shared = 0
        for index, chars in enumerate(zip(*names, strict=False), 1):
            if chars[0] != chars[1]:
                break
            shared = index if chars[0] in "/\\" else shared
        last = min(max(name.rfind("/"), name.rfind("\\")) + 1 for name in names)
        shared = min(shared, last)
        names = [f"…/{name[shared:]}" if shared > 1 else name for name in names]
    first, second = (cut_middle(name, _MAX_TITLE_NAME) for name in names)
    return first, second


def _build_introduction(handoff: Handoff) -> Iterator[Element]:
    kind = _VERDICT_KINDS[resolve_outcome(handoff)]
    sentence = format_handoff_verdict(handoff)
    yield build("p", _build_mark(kind), f" {sentence[0].upper()}{sentence[1:]}.", class_=kind)
    for label, side in (("Prefill", handoff.prefill), ("Decode", handoff.decode)):
        yield build("p", f"{label}: ", isolate(_shorten(_find_path(side))), class_="facts side")
    transfer = "all of each buffer" if handoff.full_transfer else "each buffer up to the prompt"
    memory = _MEMORY_TEXTS.get(handoff.memory, "")
    facts = [f"Consumer: {handoff.consumer_name}. It moves {transfer} through {memory}."]
    if handoff.ranks is not None:
        facts.append(
            f"Tensor parallel: {handoff.ranks.prefill} ranks of prefill, {handoff.ranks.decode} "
            "of decode. The memory below is that of an unsharded model."
        )
    yield build("p", " ".join(facts), class_="facts")


def _build_mark(kind: StateKind) -> Element:
    return build("span", MARKS[kind], class_="mark", aria_hidden="true")


def _build_body(
    handoff: Handoff, failed_models: Sequence[ModelReport], view: MemoryView
) -> Iterator[Element]:
    yield _build_memory_section(handoff, view)
    findings = [("", finding) for finding in handoff.findings]
    findings += [(report.path, each) for report in failed_models for each in report.findings]
    yield build("section", build("h2", "Findings"), _build_findings(findings))
    if handoff.notes:
        notes = build("ul", (build("li", note) for note in handoff.notes))
        yield build("section", build("h2", "Notes"), notes)
    if view.memory_map.rows:
        yield build("section", build("h2", "Buffers"), view.build_table())
    if view.memory_map.is_drawn:
        yield build_data("data", view.serialize())


def _build_memory_section(handoff: Handoff, view: MemoryView) -> Element:
    memory_map = view.memory_map
    parts: list[Element] = []
    if view.condition:
        sides = list_sides_without_token(handoff)
        names = " and ".join(sides)
        renamed = "both sides are" if len(sides) > 1 else f"{names} is"
        hint = (
            f"Nothing is transferred now: {handoff.consumer_name} selects nothing on {names}. "
            f"What follows holds after {renamed} renamed."
        )
        parts.append(build("p", hint, class_="hint"))
    if memory_map.gap:
        parts.append(build("p", memory_map.gap, class_="hint"))
    if memory_map.is_drawn:
        parts += [_build_controls(handoff, view), view.build_tracks()]
    condition = "conditional" if view.condition else None
    return build("section", build("h2", "Memory"), parts, class_=condition)


def _build_controls(handoff: Handoff, view: MemoryView) -> Element:
    """Return the prompt's length with its outcome, and how to change it; only the script can."""
    last, shown = view.memory_map.last, view.tokens
    limits: dict[str, Value] = {"min": 1, "max": last, "step": 1, "value": shown}
    limits["disabled"] = last == 1
    outcome = view.find_outcome()
    condition = f", {view.condition}" if view.condition else ""
    jumps = [
        build("li", build("a", f"{length:,}", href=f"#tokens={length}"))
        for length in _list_jumps(handoff, view.memory_map)
    ]
    return build(
        "div",
        build(
            "p",
            "A prompt of ",
            build("strong", format_token_count(shown), id="length"),
            f"{condition}: ",
            build("span", outcome.text, id="outcome", role="status", class_=outcome.kind),
        ),
        build(
            "div",
            build("label", "Prompt length in tokens", for_="slider"),
            build("input", type="range", id="slider", aria_describedby="outcome", **limits),
            view.build_strip() if last > 1 else None,
            build(
                "div",
                build(
                    "span",
                    build("label", "Tokens", for_="number"),
                    build(
                        "input", type="number", id="number", aria_describedby="outcome", **limits
                    ),
                    build("span", f"of {last}"),
                    class_="field",
                ),
                build(
                    "span",
                    build("label", "Zoom", for_="zoom"),
                    build(
                        "select",
                        (build("option", f"{100 * zoom} %", value=zoom) for zoom in _ZOOMS),
                        id="zoom",
                    ),
                    class_="field",
                ),
                build(
                    "label",
                    build("input", type="checkbox", id="failing"),
                    " List only buffers that are not correct",
                ),
                class_="row",
            ),
            build(
                "div",
                build("span", "Lengths to look at:", id="jumps-label"),
                build("ul", jumps, aria_labelledby="jumps-label", class_="jumps"),
                class_="row",
            )
            if last > 1
            else None,
            class_="controls",
            hidden=True,
        ),
    )


def _list_jumps(handoff: Handoff, memory_map: MemoryMap) -> list[int]:
    """Return lengths worth a look: asked for, or those on both sides of a change."""
    bounds = [outcome.first for outcome in memory_map.outcomes]
    lengths = {1, memory_map.last, *handoff.requested_lengths}
    for bound in bounds[:_MAX_JUMPS]:
        lengths |= {bound - 1, bound}
    lengths |= {prompt.tokens for prompt in handoff.simulated_prompts[:_MAX_JUMPS]}
    return sorted(length for length in lengths if 1 <= length <= memory_map.last)[:_MAX_JUMPS]


def _build_findings(findings: Sequence[tuple[str, Finding]]) -> Element:
    """Return a list of findings, each with the path of its model, or none for the hand-off."""
    if not findings:
        return build("p", "None.")
    items = (_build_finding(path, finding) for path, finding in findings[:_MAX_FINDINGS])
    hidden = len(findings) - _MAX_FINDINGS
    more = build("li", f"{hidden:,} more: compare -v lists all.") if hidden > 0 else None
    return build("ol", items, more, class_="findings")


def _build_finding(path: str, finding: Finding) -> Element:
    subject, message = finding.subject, _shorten(finding.message)
    kind = "wrong" if finding.severity == "error" else "warning"
    return build(
        "li",
        build("p", build("strong", f"{finding.severity} {finding.code}", class_=kind)),
        build("p", "In ", isolate(path), ":") if path else None,
        build("p", *((isolate(_shorten(subject)), " ") if subject else ()), message),
        build("p", "Fix: ", _mark_commands(_shorten(finding.hint))),
        build("p", "More: ", build("code", f"onnxkvrename explain {finding.code}")),
    )


def _mark_commands(text: str) -> Iterator[Child]:
    """Yield a text with what is between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of them is part of a name
        yield text
        return
    for index, part in enumerate(parts):
        yield build("code", part) if index % 2 else part


def _shorten(text: str) -> str:
    """Return a text without its middle if it is far longer than any of ours."""
    return shorten_text(escape_text(text), _MAX_TEXT)
