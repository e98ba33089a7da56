"""Words of messages: numbers, lists, layers, names in quotes, and what was perhaps meant."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from onnxkvrename.limits import MAX_LISTED

_BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 buffer``, ``8 buffers``, ``1 axis``, ``2 axes``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def format_bytes(size: int | None, *, is_exact: bool = True) -> str:
    """Return bytes in the largest unit that fits: ``2.25 MiB (2,359,296 bytes)``, ``2.2 MiB``.

    Args:
        size: The number of bytes; `None` is ``unknown``.
        is_exact: Whether all of its digits matter.
    """
    if size is None:
        return "unknown"
    exact = format_count(size, "byte")
    power = min((size.bit_length() - 1) // 10, len(_BYTE_UNITS) - 1) if size else 0
    if not power:
        return exact
    value = size / (1 << 10 * power)
    return (
        f"{value:.4g} {_BYTE_UNITS[power]} ({exact})"
        if is_exact
        else f"{value:.1f} {_BYTE_UNITS[power]}"
    )


def format_list(names: Sequence[str], separator: str = ", ", limit: int = MAX_LISTED) -> str:
    """Join the first `limit` names, and count the rest."""
    suffix = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + suffix


def format_layers(layers: Iterable[int]) -> str:
    """Format sorted layers, as `layer 3` or `layers 0-2, 5`, the first five runs of them."""
    return format_layer_runs(group_layer_runs(layers))


def group_layer_runs(layers: Iterable[int]) -> tuple[range, ...]:
    """Return sorted layers as runs without a gap."""
    ends: list[list[int]] = []
    for layer in layers:
        if ends and ends[-1][1] == layer - 1:
            ends[-1][1] = layer
        else:
            ends.append([layer, layer])
    return tuple(range(first, last + 1) for first, last in ends)


def format_layer_numbers(layers: Iterable[int]) -> str:
    """Format all of some sorted layers, as `0-2, 5`: for the column of a table."""
    return ", ".join(map(_format_layer_run, group_layer_runs(layers)))


def _format_layer_run(run: range) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def format_layer_runs(runs: Sequence[range]) -> str:
    """Format runs of layers as :func:`format_layers` does, without listing the layers."""
    texts = [_format_layer_run(run) for run in runs if run]
    if not texts:
        return "no layer"
    is_single = len(texts) == 1 and texts[0].isdigit()
    return f"layer {texts[0]}" if is_single else f"layers {format_list(texts)}"


def quote_word(text: str) -> str:
    r"""Return a name as one word of a shell, and without a backtick.

    Names come from models and file systems and may contain anything. In a hint, backticks mark
    commands that are pasted, so every name in a hint is quoted by this function or by
    :func:`quote_path`. A POSIX shell reads the word as the name; one with a backtick or with
    what cannot be printed is written as ``$'\140'``, which bash, zsh and ksh read as the bytes.
    """
    if "`" in text or "##" in text or not text.isprintable():
        return quote_as_bytes(text)
    return shlex.quote(text)


def quote_path(path: str) -> str:
    """Return a path as :func:`quote_word` does, so that it cannot be mistaken for an option."""
    return quote_word(f"./{path}" if path.startswith("-") else path)


def quote_as_bytes(text: str) -> str:
    r"""Return a text as ``$'\012'``: what is not plain ASCII is written as octal bytes."""
    return f"$'{''.join(map(_escape_char, text))}'"


def _escape_char(char: str) -> str:
    if " " <= char <= "~" and char not in "'`#\\":
        return char
    errors = "surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", errors))


def find_similar(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate that is most similar to `name`, whatever their capitals.

    Args:
        name: An unknown name, such as a typing error.
        candidates: The names to choose from.
        cutoff: How similar the two must be, from 0 (not at all) to 1 (equal).
    """
    from difflib import get_close_matches  # only needed after a mistake

    names = {candidate.casefold(): candidate for candidate in reversed(list(candidates))}
    similar = get_close_matches(name.casefold(), list(names), n=1, cutoff=cutoff)
    return names[similar[0]] if similar else None


def suggest_similar(name: str, candidates: Iterable[str]) -> str | None:
    """Return the hint "did you mean X?" if a candidate is similar to `name`."""
    similar = find_similar(name, candidates)
    return f"did you mean {quote_word(similar)}?" if similar else None
