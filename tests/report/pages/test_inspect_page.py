"""The page of ``inspect --html``: what a reader, a screen reader and a hostile name find in it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import models
import pytest
from cache_models import MIXED, build_cache_model
from models import saved
from tiers import thin
from window_sets import write_windows

from onnxkvrename import load_rules
from onnxkvrename.layout.inspect import InspectedBuffer, ModelSummary, fold_windows, inspect_model
from onnxkvrename.report.pages.inspect import render_inspect_page

HOSTILE = "</td></span><script>alert(1)</script>&amp;\"'{x}\x1b[2J\u202e\x00\udcff漢"
SHOWN = "</td></span><script>alert(1)</script>&amp;\"'{x}\\x1b[2J\\u202e\\x00\\xff漢"
VOID = {"meta", "wbr"}


class Page(HTMLParser):
    """A page: its elements with attributes and text; whether each is closed where it should be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self.open: list[tuple[str, list[str]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        texts: list[str] = []
        self.found.append((tag, {name: value or "" for name, value in attrs}, texts))
        if tag not in VOID:
            self.open.append((tag, texts))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not any(tag in ("style", "script") for tag, _ in self.open):
            self.text += data
        for _, texts in self.open:
            texts.append(data)

    def find(self, tag: str, class_: str = "") -> list[str]:
        """The texts of elements with a tag, and a class if one is given."""
        return [
            "".join(texts)
            for name, attributes, texts in self.found
            if name == tag and class_ in attributes.get("class", "")
        ]

    def attributes(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes, _ in self.found if name == tag]


@pytest.fixture
def mixed(tmp_path: Path) -> ModelSummary:
    """A model with buffers of every kind."""
    model = build_cache_model(MIXED, tokens=("VLLM", "VLLM"), without={"past_key.7_VLLM"})
    return inspect_model(saved(model, tmp_path / "mixed.onnx"), load_rules())._replace(
        path="exports/llama/mixed.onnx"
    )


@pytest.fixture
def hostile(mixed: ModelSummary) -> ModelSummary:
    """A model with hostile names in every place."""
    model = build_cache_model(("full",))
    model.graph.output.append(models.info("hostile_RetainedState"))
    buffers = tuple(
        item._replace(
            buffer=HOSTILE, input=HOSTILE, output=HOSTILE, shape=(HOSTILE, 2), dtype=HOSTILE
        )
        for item in mixed.buffers[:1]
    )
    findings = tuple(
        item._replace(name=HOSTILE, message=HOSTILE, hint=HOSTILE) for item in mixed.findings
    )
    return mixed._replace(path=HOSTILE, buffers=buffers, findings=findings)


def test_the_page_has_the_name_of_the_model(mixed: ModelSummary) -> None:
    page = Page(render_inspect_page([mixed]))
    assert page.find("title") == page.find("h1") == ["KV cache of llama/mixed.onnx"]
    assert "exports/llama/mixed.onnx" in page.find("p", "path")
    assert page.find("h2") == ["Map", "Findings", "Facts"]


def test_of_several_models_each_has_a_section_and_a_link(mixed: ModelSummary) -> None:
    page = Page(render_inspect_page([mixed, mixed._replace(path="b.onnx")]))
    assert page.find("title") == ["KV caches of 2 models"]
    assert page.find("h2") == ["exports/llama/mixed.onnx", "b.onnx"]
    assert page.find("h3") == ["Map", "Findings", "Facts"] * 2
    targets = [attributes["href"] for attributes in page.attributes("a")]
    assert targets == [f"#{attributes['id']}" for attributes in page.attributes("section")]


def test_the_map_has_a_header_for_each_layer_and_buffer(mixed: ModelSummary) -> None:
    page = Page(render_inspect_page([mixed]))
    assert [item["scope"] for item in page.attributes("th")] == ["col"] * 9 + ["row"] * 6
    assert page.find("th") == [
        *("layer", "0", "1", "2", "3", "4", "5", "6", "7"),
        *("past_key", "past_value", "compressed_kv", "k_pe", "conv_state", "recurrent_state"),
    ]
    (table,) = page.attributes("table")
    assert (table["role"], table["aria-label"]) == (
        "grid",
        "KV map of llama/mixed.onnx, from layer 0",
    )
    cells = page.attributes("td")
    assert len(cells) == 8 * 6
    assert {(cell["role"], cell["tabindex"]) for cell in cells} == {("gridcell", "0")}


def test_the_bytes_of_a_token_and_of_a_sequence_are_below_the_name(tmp_path: Path) -> None:
    open_sizes, fixed = (build_cache_model(("full", "window", "linear")) for _ in range(2))
    for value in (*fixed.graph.input, *fixed.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in ("ctx_len", "sliding_window"):
                dim.dim_value = 128
    texts = [
        Page(
            render_inspect_page([inspect_model(saved(model, tmp_path / "m.onnx"), load_rules())])
        ).find("p")
        for model in (open_sizes, fixed)
    ]
    assert [" ".join(found[2].split()) for found in texts] == [
        "KV bytes: 2 KiB (2,048 bytes) for each token; 2 KiB (2,048 bytes) more for each token in "
        "a window; 516 KiB (528,384 bytes) for states; a sequence depends on sizes that are not "
        "known",
        "KV bytes: 516 KiB (528,384 bytes) for states; 1.004 MiB (1,052,672 bytes) for a sequence",
    ]


def test_a_cell_says_shape_dtype_bytes_and_both_names(mixed: ModelSummary) -> None:
    first, *_ = Page(render_inspect_page([mixed])).find("span", "tip")
    assert [first] == [
        "past_key, layer 0. full attention, has the token. FLOAT16 [batch_size, 8, ctx_len, 64]. "
        "1,024 bytes \N{MULTIPLICATION SIGN} batch_size \N{MULTIPLICATION SIGN} ctx_len. "
        "past_key.0_VLLM \N{RIGHTWARDS ARROW} past_key.0_VLLM_RetainedState"
    ]


def test_a_cell_says_what_is_wrong_with_its_buffer(mixed: ModelSummary) -> None:
    tips = Page(render_inspect_page([mixed])).find("span", "tip")
    (broken,) = (tip for tip in tips if tip.startswith("past_key, layer 7."))
    assert "full attention, broken. " in broken
    assert broken.endswith("missing \N{RIGHTWARDS ARROW} past_key.7_VLLM_RetainedState")
    assert "past_key, layer 2. no such buffer in this layer" in tips
    assert "past_key, layer 5. layer without buffers" in tips


def test_the_legend_is_in_words(mixed: ModelSummary) -> None:
    page = Page(render_inspect_page([mixed]))
    (legend,) = page.find("ul", "legend")
    assert legend.split("\n")[1:] == [
        *("Ffull attention", "Wsliding window", "MMLA", "Slinear state", "!broken"),
        *(".no such buffer in this layer", "~layer without buffers", "UPPER CASE: has the token"),
        "",
    ]


def test_hostile_names_are_text(hostile: ModelSummary) -> None:
    html = render_inspect_page([hostile])
    page = Page(html)
    assert len(page.attributes("script")) == 1
    assert "alert" not in page.find("script")[0]
    assert page.text.count(SHOWN) >= 6
    assert not set(html) & {"\x1b", "\u202e", "\x00", "\udcff"}
    assert html.encode("utf-8")


def test_no_name_is_in_a_style_or_a_script(mixed: ModelSummary) -> None:
    renamed = tuple(
        item._replace(buffer="zebra", input="zebra", output="zebra") for item in mixed.buffers[:1]
    )
    page = Page(render_inspect_page([mixed._replace(path="zebra", buffers=renamed)]))
    assert not any("zebra" in text for tag in ("style", "script") for text in page.find(tag))


def test_a_page_is_the_same_wherever_it_is_made(
    mixed: ModelSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = render_inspect_page([mixed])
    for name, value in {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "20", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    assert render_inspect_page([mixed]) == before


def test_windows_of_a_set_are_one_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = sorted(write_windows(Path("set"), 12).rglob("*.onnx"))
    page = Page(
        render_inspect_page(fold_windows(inspect_model(path, load_rules()) for path in paths))
    )
    assert page.find("h1") == ["KV cache of 12 windows of Tiny in set"]
    assert len(page.attributes("table")) == 2  # bands of ten layers
    assert len(page.attributes("td")) == 12 * 2


def build_buffers(layers: int, parts: int) -> tuple[InspectedBuffer, ...]:
    """Buffers of which no two neighbors are alike, with long names."""
    one = InspectedBuffer(
        0, "x", "", "full_attention", "plain", "FLOAT", (1,), "i" * 999, "o" * 999
    )
    return tuple(
        one._replace(layer=layer, buffer=f"{part}{'b' * 999}", shape=(layer % 2,))
        for layer in range(layers)
        for part in range(parts)
    )


@pytest.mark.parametrize("parts", thin([15, 250], 1))
def test_a_page_of_many_buffers_stays_small(parts: int) -> None:
    html = render_inspect_page([ModelSummary("m.onnx", buffers=build_buffers(400, parts))])
    assert len(html) < 10_000_000
    assert "not shown: " in html
