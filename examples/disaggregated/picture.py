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

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from device import Device
from kvbuffers import PATTERN, Slot, slots, total
from prompts import SIZES

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "fixtures" / "plain" / "serving"
PICTURE = ROOT / "docs" / "disaggregated.svg"
TOKENS = SIZES["sliding_window"] + 1
WIDTH, HEIGHT = 1000, 706
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
.head {{ font-weight: 600; font-size: 19px }} .title {{ font-weight: 600; font-size: 14px }}
.mono {{ font: 12px "DejaVu Sans Mono", Menlo, Consolas, ui-monospace, monospace }}
.small {{ font-size: 11px }} .mid {{ text-anchor: middle }} .end {{ text-anchor: end }}
.edge {{ stroke-width: 1 }} .flow {{ fill: none; stroke-width: 1.6 }}
.cross {{ fill: none; stroke-width: 1.6 }}
"""


def draw() -> str:
    """Return the picture as SVG."""
    body = [*_handed_over(), *_mismatch()]
    light, dark = (
        " ".join(f"{where} {{ {paint[0]}: {paint[shade]} }}" for where, paint in PAINT.items())
        for shade in (1, 2)
    )
    style = f"{SHAPES}{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="KV buffers on their way from prefill to decode"><style>{style}</style>'
    )
    page = _box(0, 0, WIDTH, HEIGHT, "page")
    return "\n".join([head, page, *body, "</svg>\n"])


def _handed_over() -> Iterator[str]:
    """Yield the upper part: two graphs of the vision-language model, and the memory between."""
    device = _device("vlm")
    given = slots(device.buffers, TOKENS, whole=False)
    stays = [name for name in device.buffers if PATTERN not in name]
    yield _text(28, 40, "What prefill hands to decode", "head")
    yield _text(
        28, 62, f"A prompt of {TOKENS} tokens. The pattern selects; nothing else travels.", "soft"
    )
    for left, title in ((28, "prefill"), (692, "decode")):
        yield _box(left, 84, 280, 318, "box edge")
        yield _text(left + 16, 108, title, "title")
    yield _text(292, 108, "runs the prompt", "soft end")
    yield _text(956, 108, "generates token by token", "soft end")
    yield _text(500, 108, "shared memory", "title mid")
    yield _text(500, 126, f"{total(given):,} bytes", "soft mid")
    for row, slot in enumerate(given):
        yield from _row(slot, 122 + 38 * row, 146 + 33 * row)
    for row, name in enumerate(stays):
        top = 292 + 34 * row
        yield _box(44, top, 248, 27, "stays")
        yield _text(54, top + 18, name, "mono soft")
        yield _box(708, top, 248, 27, "stays")
        yield _text(718, top + 18, f"{name}: empty", "mono soft")
    yield _text(500, 306, "beside it: the memory's name,", "mid")
    yield _text(500, 324, "the prompt's length, the first token", "mid")
    yield _text(500, 362, "no names, no shapes;", "soft mid")
    yield _text(500, 380, "vision features stay", "soft mid")


def _row(slot: Slot, top: float, place: float) -> Iterator[str]:
    kind = _kind(slot)
    middle = place + 16.5
    for left in (44, 708):
        yield _box(left, top, 248, 30, kind)
        yield _text(left + 10, top + 20, slot.name, "mono")
    yield _box(416, place, 168, 33, f"{kind} edge")
    yield _text(500, middle + 4, "x".join(map(str, slot.shape)), "mono mid")
    yield _text(408, place + 5, f"{slot.offset:,}", "soft small end")
    yield _arrow(292, top + 15, 412, middle)
    yield _arrow(584, middle, 704, top + 15)


def _mismatch() -> Iterator[str]:
    """Yield the lower part: one memory, as prefill and as decode divide it."""
    written, read = (
        slots(_device(model).buffers, TOKENS, whole=False) for model in ("window_whole", "window")
    )
    size = total(written)
    yield _text(28, 446, "Prefill keeps the whole context where decode keeps its window", "head")
    note = f"A window of {TOKENS - 1}: a prompt of up to {TOKENS - 1} tokens divides the memory"
    note += f" in the same way on both sides. One of {TOKENS} does not, and nothing detects it."
    yield _text(28, 468, note, "soft")
    yield from _divided("prefill writes", 492, size, written, written)
    yield from _divided("decode reads", 600, size, read, written)
    moved = [pair for pair in zip(read, written, strict=True) if not _alike(*pair)]
    for slot, other in moved:
        start, end = _along(other.offset, size), _along(slot.offset, size)
        yield f'<path class="cross" d="M{start:.1f} 538L{end:.1f} 598"/>'
    first = moved[0][0]
    note = f"wrong from past_key.1 on: {first.shape[2]} positions of each head are read where"
    note += f" {TOKENS} were written, and all later buffers are shifted"
    yield _text(_along(size, size), 672, note, "bad end")


def _divided(
    title: str, top: float, size: int, given: list[Slot], written: list[Slot]
) -> Iterator[str]:
    """Yield the memory as one side divides it; slots that differ from `written` are marked."""
    yield _text(28, top + 27, title, "title")
    for slot, other in zip(given, written, strict=True):
        left, right = (_along(at, size) for at in (slot.offset, slot.offset + slot.size))
        kind = _kind(slot) if _alike(slot, other) else "wrong"
        yield _box(left, top, right - left, 44, f"{kind} edge")
        name = slot.name.replace(f"_{PATTERN}", "")
        yield _text((left + right) / 2, top + 19, name, "mono mid")
        yield _text((left + right) / 2, top + 36, f"{slot.offset:,}", "small mid")


def _kind(slot: Slot) -> str:
    return "key" if "key" in slot.name else "value"


def _alike(slot: Slot, other: Slot) -> bool:
    return (slot.offset, slot.shape) == (other.offset, other.shape)


def _device(model: str) -> Device:
    """Return a model, with the token in the names of its KV buffers."""
    device = Device(str(MODELS / f"{model}.onnx"), SIZES)
    device.buffers = {
        f"{name}_{PATTERN}" if name.startswith("past_") else name: buffer
        for name, buffer in device.buffers.items()
    }
    return device


def _along(offset: int, size: int) -> float:
    return 152 + 820 * offset / size


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="{8 if kind in ("page", "box edge") else 3}"/>'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    bend = (x + to_x) / 2
    line = f"M{x:.1f} {y:.1f}C{bend:.1f} {y:.1f} {bend:.1f} {to_y:.1f} {to_x - 4:.1f} {to_y:.1f}"
    tip = f"M{to_x:.1f} {to_y:.1f}l-7 -4v8z"
    return f'<path class="flow" d="{line}"/><path class="tip" d="{tip}"/>'


def main() -> int:
    """Write the picture, or compare it; return the exit code."""
    drawn = draw()
    if "--check" in sys.argv[1:]:
        return 0 if PICTURE.read_text("utf-8") == drawn else 1
    PICTURE.write_text(drawn, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
