"""Write the command of a rename as it was typed, for hints that add an option to it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onnxkvrename.findings import quote_path, quote_word
from onnxkvrename.options import list_options
from onnxkvrename.renaming.request import Request
from onnxkvrename.rules.checks import CONSUMER_TOKENS

_LEFT_OUT = {
    *("models", "profile", "rules", "jobs", "dask", "output_format", "quiet", "verbose"),
    *("check", "dry_run"),
}
"""The fields of a request that change no result, or that exclude ``--rules``."""


def format_rename(request: Request, models: Iterable[Path]) -> str:
    """Return the command that renames some models as it was asked for, without its rules."""
    words = ["onnxkvrename", *(quote_path(str(path)) for path in models)]
    for name, option in list_options(Request).items():
        value = getattr(request, name)
        if name in _LEFT_OUT or value == Request._field_defaults[name]:
            continue
        if name == "token" and _is_token_of(request.target, value):
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words.append(option.flags.split()[0])
            if not isinstance(item, bool):
                words.append(quote_path(str(item)) if isinstance(item, Path) else quote_word(item))
    return " ".join(words)


def _is_token_of(target: str | None, token: str) -> bool:
    """Return whether a target sets a token by itself."""
    return target is not None and CONSUMER_TOKENS.get(token.lower()) == (token, target)
