"""Sizes of dimensions and of memory, as they are typed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

_MIN_BYTES_WITHOUT_UNIT = 1 << 20
"""A smaller number without a unit was meant in another one, as 20 for 20G."""


def parse_dim_sizes(texts: Sequence[str], prefix: str = "") -> dict[str, int]:
    """Return the sizes that ``--dim`` sets.

    Args:
        texts: Texts of the form ``SYMBOL=SIZE``.
        prefix: What was typed before each text, for messages.

    Raises:
        click.UsageError: A text has another form, or a symbol has two sizes.
    """
    sizes: dict[str, int] = {}
    for text in texts:
        symbol, size = _parse_dim_size(text, prefix)
        if sizes.setdefault(symbol, size) != size:
            raise click.UsageError(
                f"--dim {prefix}{symbol} has two sizes: {sizes[symbol]} and {size}; pass one"
            )
    return sizes


def _parse_dim_size(text: str, prefix: str) -> tuple[str, int]:
    symbol, _, size = text.rpartition("=")
    if not symbol or not re.fullmatch("-?[0-9]+", size):
        raise click.UsageError(f"--dim {prefix + text!r}: pass SYMBOL=SIZE, for example ctx_len=32")
    if len(size) > 10 or not 0 < int(size) < 1 << 31:
        raise click.UsageError(
            f"--dim {prefix + text!r}: a size must be at least 1 and less than 2^31"
        )
    return symbol, int(size)


def parse_memory_size(option: str, text: str, limit: int) -> int:
    """Return the bytes of a size such as ``512M``; its units are powers of 1024.

    Args:
        option: The option that the text is given to.
        text: A number, with or without a unit; without one it is bytes, and 1 MiB or more.
        limit: The most bytes that the option takes.

    Raises:
        click.UsageError: The text is no such size, or of nothing, or of more than `limit`, or
            it lacks a unit.
    """
    match = re.fullmatch("([0-9]{1,19})([KMGT]?)(?:i?B)?", text.strip(), re.ASCII | re.IGNORECASE)
    size = int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ") if match else 0
    if not 0 < size <= limit:
        raise click.UsageError(f"{option} {text!r}: pass a size such as 512M or 8G")
    if size < _MIN_BYTES_WITHOUT_UNIT and text.strip().isdigit():
        raise click.UsageError(
            f"{option} {text!r}: add a unit: {size}G or {size}M, or {size}B for bytes"
        )
    return size
