"""Read pages of hand-offs, and hand-offs to make pages of."""

from __future__ import annotations

from html.parser import HTMLParser

from handoff_sides import build_side_layout, describe_attention, predict_handoff

from onnxkvrename import load_rules
from onnxkvrename.findings import Finding
from onnxkvrename.handoff.compare import Handoff, SimulatedPrompt
from onnxkvrename.handoff.simulate import is_in_ranges
from onnxkvrename.report.documents.compare_json import describe_handoff
from onnxkvrename.report.pages.compare import render_compare_page

SIZED = {"ctx_len": 4096, "sliding_window": 128}
VOID = {"meta", "input", "wbr"}


class Reader(HTMLParser):
    """Reads a page: its elements with their text, and the cells of its table.

    Args:
        document: The page.
    """

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.kinds: list[str] = []
        self.totals: list[str] = []
        self.text = ""
        self.feed(document)
        self.close()
        assert self.open == []
        self.rows = [[cell.strip() for cell in row] for row in self.rows]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes))
        if tag == "tr" and any(each.get("id") == "rows" for _, each in self.open):
            self.rows.append([])
            self.kinds += find_class(attributes)[:1]
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if self.rows and "table" in tags and tags[-1] != "tr":
            self.rows[-1][-1] += data
        if tags[-1:] == ["span"] and "total" in find_class(self.open[-2][1]):
            self.totals.append(data)
        if not {"script", "style"} & set(tags):
            self.text += data
        for _, attributes in self.open:
            if attributes.get("id"):
                key = attributes["id"] or ""
                self.texts[key] = self.texts.get(key, "") + data


def render(handoff: Handoff, *, findings: tuple[Finding, ...] = ()) -> str:
    """Return the page of a hand-off, as the command writes it.

    Args:
        handoff: The hand-off.
        findings: Findings of prefill itself.
    """
    content = describe_handoff(handoff, ((), ()), load_rules().profile_choice)
    assert content.prefill is not None
    prefill = content.prefill._replace(findings=findings)
    content = content._replace(prefill=prefill)
    return render_compare_page(content)


def render_length(handoff: Handoff, tokens: int) -> str:
    """Return the page of a hand-off for a prompt of this length alone."""
    setup, simulation = handoff.comparison.setup, handoff.comparison.simulation
    assert simulation is not None
    prompt = SimulatedPrompt(
        tokens,
        setup.build_prefill_slots(tokens),
        setup.build_decode_slots(tokens),
        tuple(i for i, each in simulation.wrong_ranges.items() if is_in_ranges(tokens, each)),
        is_in_ranges(tokens, handoff.verdict.refused_ranges),
    )
    return render(handoff._replace(simulated_prompts=(prompt,)))


def compare_window(prefill_window: bool = False, **sizes: int) -> Handoff:
    """Compare three layers, of which one side keeps a window in the middle one."""
    window = (
        *describe_attention(0),
        *describe_attention(1, shape="2,sliding_window,4"),
        *describe_attention(2),
    )
    sides = [
        build_side_layout(*describe_attention(0, 1, 2), **sizes),
        build_side_layout(*window, **sizes),
    ]
    return predict_handoff(*(reversed(sides) if prefill_window else sides))


def find_class(attributes: dict[str, str | None]) -> list[str]:
    return (attributes.get("class") or "").split()
