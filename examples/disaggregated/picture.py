"""Draw docs/disaggregated.svg: a hand-off, and one that a mismatch corrupts.

    python picture.py           write it
    python picture.py --check   exit 1 if the file differs

Names, shapes and offsets come from the models and from kvbuffers.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from textwrap import wrap

from device import Device
from kvbuffers import PATTERN, Slot, slots, total
from prompts import SIZES

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "fixtures" / "plain" / "serving"
PICTURE = ROOT / "docs" / "disaggregated.svg"
TOKENS = SIZES["sliding_window"] + 1
WIDTH, SHOWN_WIDTH, MARGIN = 420, 560, 16
RIGHT, MIDDLE = WIDTH - MARGIN, WIDTH / 2
LINE, ROW_HEIGHT = 18, 42
LINE_LENGTH, HEAD_LENGTH = 56, 40
"""Letters of a line of text, and of a heading."""
PAINT = {  # class: property, color on a light page, color on a dark one
    "text": ("fill", "#1f2328", "#e6edf3"),
    ".soft": ("fill", "#59636e", "#9198a1"),
    ".page": ("fill", "#ffffff", "#0d1117"),
    ".box": ("fill", "#f6f8fa", "#161b22"),
    ".edge": ("stroke", "#d1d9e0", "#3d444d"),
    ".key": ("fill", "#b6e3ff", "#0c4a7a"),
    ".value": ("fill", "#d8c9fb", "#4b2f82"),
    ".stays": ("fill", "#eaeef2", "#262c36"),
    ".wrong": ("fill", "#ffcecb", "#8e1519"),
    ".bad": ("fill", "#cf222e", "#ff7b72"),
    ".flow": ("stroke", "#0969da", "#4493f8"),
    ".tip": ("fill", "#0969da", "#4493f8"),
    ".cross": ("stroke", "#cf222e", "#ff7b72"),
}
FONT = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
SHAPES = f"""
text {{ font: 13px {FONT} }}
.head {{ font-weight: 600; font-size: 17px }} .title {{ font-weight: 600; font-size: 14px }}
.mono {{ font: 12px "DejaVu Sans Mono", Menlo, Consolas, ui-monospace, monospace }}
.mid {{ text-anchor: middle }}
.edge {{ stroke-width: 1 }} .flow {{ fill: none; stroke-width: 1.6 }}
.cross {{ fill: none; stroke-width: 1.6 }}
"""


def draw() -> str:
    """Return the picture as SVG, with letters large enough for its width to be read on a phone."""
    top = 34.0
    body: list[str] = []
    for part in (_handed_over, _mismatch):
        height, drawn = part()
        body += [f'<g transform="translate(0 {top:.0f})">', *drawn, "</g>"]
        top += height
    light, dark = (
        " ".join(f"{where} {{ {paint[0]}: {paint[shade]} }}" for where, paint in PAINT.items())
        for shade in (1, 2)
    )
    style = f"{SHAPES}{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" '
        f'width="{SHOWN_WIDTH}" height="{top * SHOWN_WIDTH / WIDTH:.0f}" role="img" '
        f'aria-label="KV buffers on their way from prefill to decode"><style>{style}</style>'
    )
    page = _box(0, 0, WIDTH, top, "page")
    return "\n".join([head, page, *body, "</svg>\n"])


def _handed_over() -> tuple[float, list[str]]:
    """Return the height and the drawing of two vision-language graphs and the memory between."""
    device = _device("vlm")
    given = slots(device.buffers, TOKENS, whole=False)
    stays = [name for name in device.buffers if PATTERN not in name]
    note = f"A prompt of {TOKENS} tokens. Names with {PATTERN} are selected; nothing else travels."
    drawn = [_text(MARGIN, 0, "What prefill hands to decode", "head")]
    drawn += _lines(22, note, "soft")
    top, bottom = 58, 58 + 52 + ROW_HEIGHT * len(given)
    sides = (("prefill", "runs the prompt", MARGIN), ("decode", "generates", RIGHT - 124))
    for title, does, left in sides:
        drawn.append(_box(left, top, 124, bottom - top, "box edge"))
        drawn.append(_text(left + 9, top + 20, title, "title"))
        drawn.append(_text(left + 9, top + 38, does, "soft"))
    drawn.append(_text(MIDDLE, top + 20, "shared memory", "title mid"))
    drawn.append(_text(MIDDLE, top + 38, f"{total(given):,} bytes", "soft mid"))
    for number, slot in enumerate(given):
        drawn += _row(slot, top + 48 + ROW_HEIGHT * number)
    note = "Beside it: the memory's name, the prompt's length and the first token; no names, no "
    top = bottom + 24
    texts = list(_lines(top, f"{note}shapes. Vision features stay, decode's are empty:", "soft"))
    top += LINE * len(texts)
    return top + 52, [*drawn, *texts, _text(MARGIN, top, ", ".join(stays), "mono")]


def _row(slot: Slot, top: float) -> Iterator[str]:
    kind = _kind(slot)
    for left in (MARGIN + 8, RIGHT - 116):
        yield _box(left, top + 5, 108, 30, kind)
        yield _text(left + 8, top + 25, _shorten(slot), "mono")
    yield _box(MIDDLE - 38, top, 76, ROW_HEIGHT, f"{kind} edge")
    yield _text(MIDDLE, top + 17, "x".join(map(str, slot.shape)), "mono mid")
    yield _text(MIDDLE, top + 34, f"{slot.offset:,}", "mono mid")
    for start, end in ((MARGIN + 116, MIDDLE - 40), (MIDDLE + 38, RIGHT - 118)):
        yield _arrow(start, end, top + 20)


def _mismatch() -> tuple[float, list[str]]:
    """The window's trap: the same memory, as each side divides it; the height first."""
    written, read = (
        slots(_device(model).buffers, TOKENS, whole=False) for model in ("window_whole", "window")
    )
    size = total(written)
    title = "Prefill keeps the whole context where decode keeps its window"
    drawn = list(_lines(0, title, "head", HEAD_LENGTH, 22))
    note = f"A window of {TOKENS - 1}: a prompt of up to {TOKENS - 1} tokens divides the memory"
    note += f" in the same way on both sides. One of {TOKENS} does not, and nothing detects it."
    texts = list(_lines(len(drawn) * 22, note, "soft"))
    top = len(drawn) * 22 + len(texts) * LINE + 12
    drawn += texts
    drawn += _divided("prefill writes", top, size, written, written)
    drawn += _divided("decode reads", top + 106, size, read, written)
    moved = [pair for pair in zip(read, written, strict=True) if not _alike(*pair)]
    for slot, other in moved:
        start, end = _along(other.offset, size), _along(slot.offset, size)
        drawn.append(f'<path class="cross" d="M{start:.1f} {top + 54}L{end:.1f} {top + 112}"/>')
    first = moved[0][0]
    note = f"wrong from past_key.1 on: {first.shape[2]} positions of each head are read where"
    note += f" {TOKENS} were written, and all later buffers are shifted"
    texts = list(_lines(top + 196, note, "bad"))
    return top + 196 + LINE * len(texts), drawn + texts


def _divided(
    title: str, top: float, size: int, given: list[Slot], written: list[Slot]
) -> Iterator[str]:
    """The memory as one side divides it; what was not ``written`` so is marked."""
    below = title.startswith("decode")
    yield _text(MARGIN, top + (68 if below else 0), title, "title")
    top += 6 if below else 8
    for slot, other in zip(given, written, strict=True):
        left, right = (_along(at, size) for at in (slot.offset, slot.offset + slot.size))
        kind = _kind(slot) if _alike(slot, other) else "wrong"
        yield _box(left, top, right - left, 44, f"{kind} edge")
        name = _shorten(slot).removeprefix("past_")
        yield _text((left + right) / 2, top + 19, name, "mono mid")
        yield _text((left + right) / 2, top + 36, f"{slot.offset:,}", "mono mid")


def _shorten(slot: Slot) -> str:
    return slot.name.replace(f"_{PATTERN}", "")


def _kind(slot: Slot) -> str:
    return "key" if "key" in slot.name else "value"


def _alike(slot: Slot, other: Slot) -> bool:
    return (slot.offset, slot.shape) == (other.offset, other.shape)


def _device(model: str) -> Device:
    """A model, its KV buffers with the token."""
    device = Device(str(MODELS / f"{model}.onnx"), SIZES)
    device.buffers = {
        f"{name}_{PATTERN}" if name.startswith("past_") else name: buffer
        for name, buffer in device.buffers.items()
    }
    return device


def _along(offset: int, size: int) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * offset / size


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="{8 if kind in ("page", "box edge") else 3}"/>'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _lines(
    top: float, text: str, kind: str, length: int = LINE_LENGTH, height: int = LINE
) -> Iterator[str]:
    """A text in lines, the first at ``top``."""
    for number, line in enumerate(wrap(text, length, break_on_hyphens=False)):
        yield _text(MARGIN, top + number * height, line, kind)


def _arrow(x: float, to_x: float, y: float) -> str:
    line, tip = f"M{x:.1f} {y:.1f}H{to_x - 4:.1f}", f"M{to_x:.1f} {y:.1f}l-7 -4v8z"
    return f'<path class="flow" d="{line}"/><path class="tip" d="{tip}"/>'


def main() -> int:
    """Write the picture, or compare it; the exit code."""
    drawn = draw()
    if "--check" in sys.argv[1:]:
        return 0 if PICTURE.read_text("utf-8") == drawn else 1
    PICTURE.write_text(drawn, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
