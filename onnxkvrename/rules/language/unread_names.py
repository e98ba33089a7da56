"""New names that the rules that wrote them do not read as the same buffer."""

from __future__ import annotations

from collections.abc import Mapping

from onnxkvrename.errors import RulesError
from onnxkvrename.rules.profile import NameMatch, fill_template

_COMMON_TOKENS = ("VLLM", "vllmKvCache")


def build_unread_error(
    match: NameMatch, parts: Mapping[str, str], name: str, source: str
) -> RulesError:
    """Return the error for a name with a token that is not read back.

    The hint is about the token if the rules read another one back, else about the rules.

    Args:
        match: The name before.
        parts: The parts of the new name, with its token.
        name: The new name.
        source: What the rules are called.
    """
    token = parts["token"]
    other = next((other for other in _COMMON_TOKENS if _is_read_back(match, parts, other)), None)
    return RulesError(
        f"{match.side}_name writes {name!r}, which cannot be parsed back by "
        f"`{match.side}` as {match.buffer}, layer {match.layer}, token {token or 'none'}",
        path=source,
        hint=f"choose another token, for example {other}"
        if other is not None and token
        else f"correct {match.side}_name or {match.side} in the rules",
    )


def _is_read_back(match: NameMatch, parts: Mapping[str, str], token: str) -> bool:
    name = fill_template(match.rule.templates[match.side], {**parts, "token": token}, token)
    reread = match.rule.match(match.side, name)
    return reread is not None and (reread.pair_key, reread.token) == (match.pair_key, token)
