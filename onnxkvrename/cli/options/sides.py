"""Options whose values may be for one side of a hand-off: ``prefill:VALUE`` or ``decode:VALUE``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import click

SIDES = ("prefill", "decode")
_Value = TypeVar("_Value")


class SideValues(NamedTuple, Generic[_Value]):
    """The values of an option.

    Attributes:
        both: Those without a prefix, for both sides.
        prefill: Those of prefill alone.
        decode: Those of decode alone.
    """

    both: tuple[_Value, ...]
    prefill: tuple[_Value, ...]
    decode: tuple[_Value, ...]


class SideOption(click.Option):
    """An option that may be repeated, with ``prefill:`` or ``decode:`` before a value.

    Args:
        value_type: The type of a value without its prefix.
        is_single: Whether a side has one value.
    """

    def __init__(
        self, *args: Any, value_type: click.ParamType[Any], is_single: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **{**kwargs, "multiple": True})
        self.value_type = value_type
        self.is_single = is_single

    def process_value(self, ctx: click.Context, value: Any) -> SideValues[Any]:
        """Return the values by side; a usage error for two of one side where it has one."""
        values: dict[str, dict[Any, None]] = {"": {}, "prefill": {}, "decode": {}}
        for text in super().process_value(ctx, value):
            prefix, separator, rest = text.partition(":")
            side, rest = (prefix, rest) if separator and prefix in SIDES else ("", text)
            values[side][self.value_type.convert(rest, self, ctx)] = None
        for found in values.values():
            if self.is_single and len(found) > 1:
                first, second = list(found)[:2]
                option = max(self.opts, key=len)
                raise click.UsageError(f"{option} has two values: {first} and {second}; pass one")
        return SideValues(*map(tuple, values.values()))


def add_side_option(
    *names: str,
    metavar: str,
    value_type: click.ParamType[Any] = click.STRING,
    is_single: bool = False,
    help: str,  # click's own word
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an option whose values may be for one side."""
    return click.option(
        *names,
        cls=SideOption,
        metavar=f"[SIDE:]{metavar}",
        value_type=value_type,
        is_single=is_single,
        help=help,
    )
