"""Check all models of a command together, and say what is known of those without KV buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.load import find_profiles
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request
from onnxkvrename.text import format_list, quote_path

_MATCH_COMMAND = "onnxkvrename profiles --match"
NO_CACHE_HINT = (
    "export the model with its cache as inputs and outputs; if it is an encoder, pass its decoder"
)


def check_models_together(
    models: Sequence[KvModel],
    rules: Rules,
    request: Request,
    *,
    is_complete: bool = True,
) -> list[list[Finding]]:
    """Return the findings that only all models together show, for each of them.

    Models with a ``part`` are checked as sets, and their tokens if the `request` is to check only.
    Unless the command could read all its models (`is_complete`), another one may be the missing
    window, or the only one with buffers.
    """
    findings: list[list[Finding]] = [[] for _ in models]
    connected = [m for m in models if (m.plan.feeds or m.needs) and not m.is_apart]
    without = [
        index
        for index, model in enumerate(models)
        if not (model.pairs or model.plan.name_map or model in connected)
    ]
    if without:
        for index in without:
            outputs = models[index].output_names
            if len(without) == len(models) and is_complete:
                path = models[index].path
                findings[index].append(build_no_buffers_finding(outputs, rules, path))
            else:
                findings[index] += _check_other_profiles(outputs, rules)
    if connected and is_complete:
        from onnxkvrename.rules.feeds import check_feeds  # most models stand alone

        for index, finding in check_feeds(models):
            findings[index].append(finding)
    indexes = [index for index, model in enumerate(models) if model.part is not None]
    if indexes and is_complete:
        from onnxkvrename.rules.windows import check_parts  # most models are not windows

        parts = [models[index] for index in indexes]
        for part_index, finding in check_parts(parts, rules, request):
            findings[indexes[part_index]].append(finding)
    return findings


def build_no_buffers_finding(
    outputs: Iterable[str], rules: Rules | None = None, path: str = ""
) -> Finding:
    """Return finding KV001 for a model without buffers: the rules match none of the outputs.

    Args:
        outputs: The outputs of the model.
        rules: The rules; ``None`` for those that no user has chosen.
        path: The model; empty for one in memory.
    """
    names = list(outputs)
    if rules is not None and not rules.is_built_in and path:
        words = f"{quote_path(path)} --rules {quote_path(rules.name)}"
        message = f"no name matches the rules of {rules.name}: the outputs are {format_list(names)}"
        hint = f"`{_MATCH_COMMAND} {words}` shows where each name fails"
        return build_finding("KV001", "", message, hint)
    own_profile = "" if rules is None else rules.name
    others = [name for name in find_profiles(names) if name != own_profile]
    if others:
        message = f"no KV buffer matches these rules: the outputs are {format_list(names)}"
        return build_finding("KV001", "", message, f"`--profile {others[0]}` matches them")
    message = f"no KV buffer here: the outputs are {format_list(names)}"
    if not names:
        message = "no KV buffer: the model has no outputs"
    return build_finding("KV001", "", message, NO_CACHE_HINT)


def is_about_own_rules(finding: Finding) -> bool:
    """Return whether KV001 says that rules of the user match no name."""
    return _MATCH_COMMAND in finding.hint


def _check_other_profiles(outputs: Iterable[str], rules: Rules) -> Iterator[Finding]:
    """Yield KV001 for a model without buffers, beside others, that another profile knows.

    It is an error where the rules were picked for the user, who may not know that they leave
    a model out, else a warning.

    Only a built-in profile is compared with the others.
    """
    if not rules.is_built_in:
        return
    is_picked = rules.choice is not None and rules.choice.picked
    for name in find_profiles(list(outputs)):
        own, other = f"`--profile {rules.name}`", f"`--profile {name}`"
        again = f"run with {own}, then with {other}" if is_picked else f"run again with {other}"
        finding = build_finding(
            "KV001",
            "",
            f"profile {rules.name} matches no KV buffer of this model, but profile {name} does",
            f"{again} (a rename: on the results)",
        )
        yield finding if is_picked else finding._replace(severity="warning")
        return
