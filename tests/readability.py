"""What keeps a page from being read, as a browser draws it: overflow, cut letters, contrast."""

from __future__ import annotations

from browser import Page

_OVERFLOWING = """[...document.querySelectorAll("body *")]
  .filter((item) => item.getClientRects().length && !item.closest(".scroll, .tip, th > bdi"))
  .filter((item) => item.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((item) => item.outerHTML.slice(0, 90))"""
_LOW_CONTRAST = """(() => {
  const parse = (color) => (color.match(/[0-9.]+/g) || []).map(Number);
  const luminance = ([red, green, blue]) => [red, green, blue]
    .map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const findBackground = (item) => {
    for (let each = item; each; each = each.parentElement) {
      const rect = each.matches(".slot, svg g, svg") ? each.querySelector(":scope > rect") : null;
      const fill = rect ? getComputedStyle(rect).fill : "";
      const box = fill.startsWith("rgb") ? fill : getComputedStyle(each).backgroundColor;
      const color = parse(box);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const item = walker.currentNode.parentElement;
    const isText = walker.currentNode.textContent.trim() && item.getClientRects().length;
    if (!isText || item.closest("script, style, title, desc")) continue;
    const style = getComputedStyle(item);
    const color = parse(item.closest("svg") ? style.fill : style.color);
    const [low, high] = [color, findBackground(item)].map(luminance).sort((a, b) => a - b);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < (isLarge ? 3 : 4.5)) {
      found.add(`${contrast.toFixed(2)} ${item.outerHTML.slice(0, 90)}`);
    }
  }
  return [...found];
})()"""


def list_overflowing(page: Page) -> list[str]:
    """List the elements that reach beyond the window, but for what scrolls in a box of its own."""
    found: list[str] = page.evaluate(_OVERFLOWING)
    return found


def list_low_contrast(page: Page) -> list[str]:
    """List the texts whose contrast is below that of WCAG 2 AA, as they are drawn."""
    found: list[str] = page.evaluate(_LOW_CONTRAST)
    return found


def list_unmarked_stops(page: Page, count: int) -> list[str]:
    """Press Tab some times; list the elements that get the focus and do not look different."""
    draw = """(() => {
      const item = document.activeElement;
      const rect = item.querySelector(":scope > rect");
      const style = getComputedStyle(rect || item);
      const mark = rect ? style.strokeWidth : `${style.outlineStyle} ${style.outlineWidth}`;
      return [item.outerHTML.slice(0, 90), mark];
    })()"""
    found = []
    for _ in range(count):
        page.press("Tab")
        text, mark = page.evaluate(draw)
        if mark.startswith("none") or mark.endswith(" 0px") or mark in ("0px", "1px"):
            found.append(text)
    return found
