"""The picture of ``inspect --svg``: what is drawn, inside its frame, and nothing from elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from cache_models import MIXED, build_cache_model
from models import saved
from tiers import thin
from window_sets import write_windows

from onnxkvrename import load_rules
from onnxkvrename.layout.inspect import ModelSummary, inspect_model
from onnxkvrename.layout.window_sets import fold_windows
from onnxkvrename.report.pages.inspect_picture import START_PATTERN, render_svg

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert(1)</script>&amp;{x}\x1b[2J\u202e\x00\udcff漢"
SHOWN = "</text><script>alert(1)</script>&amp;{x}\\x1b[2J\\u202e\\x00\\xff漢"


@pytest.fixture
def mixed(tmp_path: Path) -> ModelSummary:
    """A model with buffers of every kind."""
    model = build_cache_model(MIXED, tokens=("VLLM", "VLLM"), without={"past_key.7_VLLM"})
    return inspect_model(saved(model, tmp_path / "mixed.onnx"), load_rules())._replace(
        path="exports/llama/mixed.onnx"
    )


def draw(*summaries: ModelSummary) -> ElementTree.Element:
    return ElementTree.fromstring(render_svg(summaries))


def list_texts(picture: ElementTree.Element) -> list[str]:
    """The texts of a picture in their order, without those that only hovering shows."""
    return ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]


def place_texts(
    element: ElementTree.Element, x: float = 0.0, y: float = 0.0
) -> list[tuple[float, float, str]]:
    """Where each text of a picture begins."""
    if moved := re.fullmatch(r"translate\((\S+) (\S+)\)", element.get("transform", "")):
        x, y = x + float(moved[1]), y + float(moved[2])
    found = []
    if element.tag == f"{SVG}text":
        own = (element.text or "") + "".join(child.tail or "" for child in element)
        found.append((x + float(element.get("x", 0)), y + float(element.get("y", 0)), own))
    return found + [place for child in element for place in place_texts(child, x, y)]


def test_a_picture_has_the_name_and_the_map_of_the_model(mixed: ModelSummary) -> None:
    picture = draw(mixed)
    title = picture.find(f"{SVG}title")
    assert title is not None
    assert title.text == "KV map of llama/mixed.onnx"
    texts = list_texts(picture)
    assert texts[0] == "llama/mixed.onnx"
    start = texts.index("past_keypast_key")  # its title, which hovering shows, and its text
    assert texts[start - 8 : start] == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert texts[start + 1 : start + 9] == ["F", "W", ".", ".", "S", "~", "F", "!"]


def test_the_legend_and_the_kinds_are_in_words(mixed: ModelSummary) -> None:
    texts = list_texts(draw(mixed))
    for text in (
        *("full attention", "sliding window", "MLA", "linear state", "broken"),
        *("no such buffer in this layer", "layer without buffers", "UPPER CASE: has the token"),
        "sliding window: past_key, past_value of layer 1",
        "FLOAT16 [batch_size, 8, sliding_window, 64]",
    ):
        assert text in texts
    assert any(text.startswith("error KV101: past_key.7_VLLM_RetainedState") for text in texts)


def test_everything_is_inside_the_frame(mixed: ModelSummary) -> None:
    long = mixed._replace(path="w" * 300)
    picture = draw(mixed, long)
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for x, y, text in place_texts(picture):
        assert 0 < y < height - 5
        assert x > 0
        assert x + len(text) * 8 < width, text


def test_letters_can_be_read_where_a_phone_shrinks_the_picture(mixed: ModelSummary) -> None:
    picture = render_svg([mixed])
    width = float(ElementTree.fromstring(picture).attrib["viewBox"].split()[2])
    sizes = [int(size) for size in re.findall(r"font(?:-size)?: (?:600 )?(\d+)px", picture)]
    assert min(sizes) * 336 / width >= 8  # 360 px less the margins of a page


def test_light_and_dark_have_colors_of_their_own(mixed: ModelSummary) -> None:
    picture = render_svg([mixed])
    assert picture.count("@media screen and (prefers-color-scheme: dark)") == 2
    for kind in ("full_attention", "mamba"):
        assert picture.count(f"--kind-{kind}: #") == 2


def test_a_picture_stands_alone(mixed: ModelSummary) -> None:
    picture = render_svg([mixed])
    assert set(re.findall(r"\w+://[^\s\"']+", picture)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|@font-face|url\(|<link|src=|<script|\son\w+=", picture)


def test_a_later_run_knows_a_picture_by_its_beginning(mixed: ModelSummary) -> None:
    long = mixed._replace(path="/".join(["n" * 200] * 2))
    for summaries in ([], [mixed], [long] * 40):
        assert re.match(START_PATTERN, render_svg(summaries)[:512])


def test_hostile_names_are_text(mixed: ModelSummary) -> None:
    buffers = (mixed.buffers[0]._replace(buffer=HOSTILE), *mixed.buffers[1:])
    findings = tuple(item._replace(name=HOSTILE) for item in mixed.findings)
    model = mixed._replace(path=HOSTILE, buffers=buffers, findings=findings)
    picture = render_svg([model])
    texts = "".join(ElementTree.fromstring(picture).itertext())
    assert SHOWN in texts
    assert f"{SVG}script" not in {item.tag for item in ElementTree.fromstring(picture).iter()}
    assert not set(picture) & {"\x1b", "\u202e", "\x00", "\udcff"}
    assert picture.encode("utf-8")


def test_bands_are_about_equal(mixed: ModelSummary) -> None:
    one = mixed.buffers[0]
    for count, bands in ((16, 1), (17, 2), (94, 6)):
        buffers = tuple(one._replace(layer=layer) for layer in range(count))
        texts = list_texts(draw(ModelSummary("m.onnx", buffers=buffers)))
        assert texts.count("past_keypast_key") == bands


def test_windows_of_a_set_are_one_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = sorted(write_windows(Path("set"), 12).rglob("*.onnx"))
    windows = fold_windows(inspect_model(path, load_rules()) for path in paths)
    texts = list_texts(draw(*windows))
    assert texts[0] == "12 windows of Tiny in set"
    assert [text for text in texts if text.isdigit()] == [str(layer) for layer in range(12)]


@pytest.mark.parametrize("parts", thin([15, 50], 1))
def test_a_picture_of_many_buffers_stays_small(mixed: ModelSummary, parts: int) -> None:
    one = mixed.buffers[0]
    buffers = tuple(
        one._replace(layer=layer, buffer=f"{part}{'b' * 999}", shape=(layer % 2,))
        for layer in range(400)
        for part in range(parts)
    )
    assert len(render_svg([ModelSummary("m.onnx", buffers=buffers)])) < 5_000_000
