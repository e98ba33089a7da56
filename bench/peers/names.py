"""Helpers of every peer: the new name of a buffer, and the files to work on."""

import re
import sys
from collections.abc import Callable, Iterable

BUFFER = re.compile(r"(past_key|past_value)\.(\d+)(_RetainedState)?")


def renamed(name: str) -> str:
    match = BUFFER.fullmatch(name)
    return f"{match[1]}.{match[2]}_VLLM{match[3] or ''}" if match else name


def mapping(names: Iterable[str]) -> dict[str, str]:
    return {name: renamed(name) for name in names if renamed(name) != name}


def on_each(rename: Callable[[str, str], None]) -> None:
    """`script.py SOURCE TARGET [SOURCE TARGET ...]`"""
    paths = sys.argv[1:]
    for source, target in zip(paths[::2], paths[1::2], strict=True):
        rename(source, target)
