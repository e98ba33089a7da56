"""Pick the profile that knows the names of some models, if the user names none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.files.find import list_models
from onnxkvrename.files.read import ModelSource
from onnxkvrename.model.file import open_model
from onnxkvrename.model.signature import Signature
from onnxkvrename.rules.load import AUTO_PROFILE, list_profiles, load_rules
from onnxkvrename.rules.plan import REASON_UNKNOWN, TokenChange, build_rename_plan
from onnxkvrename.rules.profile import ProfileChoice, Rules
from onnxkvrename.text import format_list


class _Fit(NamedTuple):
    """How well a profile knows some models.

    Attributes:
        rules: The profile.
        whole: The number of buffers that have the sides that they should have.
        broken: The number of missing sides, duplicates and states that it does not know.
        names: The names that it knows.
    """

    rules: Rules
    whole: int
    broken: int
    names: frozenset[str]

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """A key that sorts better profiles later, of equals the one for fewer kinds of names."""
        return not self.broken, self.whole, -self.broken, -len(self.rules.kv_rules)


def pick_rules(paths: Sequence[ModelSource], profile: str | None, rules_path: Path | None) -> Rules:
    """Return the rules that a command should use for some models.

    Args:
        paths: Models, and directories with models; what cannot be read is ignored.
        profile: The profile that the user asks for; ``None`` for the default one, or another
            one if only that knows the names; ``auto`` for the one that knows them best.
        rules_path: A file with rules, used instead of a profile.

    Raises:
        RulesError: The profile or the file cannot be used, or several profiles know the names
            equally well.
        ModelError: A path does not exist or cannot be listed.
    """
    if rules_path is not None or profile not in (None, AUTO_PROFILE):
        return load_rules(profile, rules_path)
    default = load_rules()
    signatures = []
    for model in list_models(paths):
        signature = _read_signature(model)
        if signature is None:
            continue
        if profile is None and _knows_names(default, signature):
            return default
        signatures.append(signature)
    return choose_rules(signatures, default)


def choose_rules(signatures: Sequence[Signature], default: Rules) -> Rules:
    """Return the rules of the profile that knows the names of some models best.

    The `default` is returned if no profile matches any name.

    Raises:
        RulesError: Several profiles know the names equally well.
    """
    rated = (_rate_profile(name, signatures) for name in list_profiles())
    fits = [fit for fit in rated if fit is not None]
    if not fits:
        return default
    best = max(fits, key=lambda fit: fit.rank)
    rivals = [fit.rules.name for fit in fits if fit.rank == best.rank]
    if len(rivals) > 1:
        raise RulesError(
            f"{len(rivals)} profiles match these names of KV buffers: {format_list(rivals)}",
            hint=f"choose one: {' or '.join(f'`--profile {name}`' for name in rivals[:3])}",
        )
    also = tuple(fit.rules.name for fit in fits if fit.names != best.names)
    return best.rules._replace(choice=ProfileChoice(best.rules.name, True, also))


def _read_signature(model: ModelSource) -> Signature | None:
    """Return the signature of a model, ``None`` for one that the command itself reports."""
    try:
        with open_model(model) as opened:
            return opened.signature
    except ModelError:
        return None


def _knows_names(rules: Rules, signature: Signature) -> bool:
    return any(
        rules.match(side, value.name) is not None
        for side, values in (("output", signature.outputs), ("input", signature.inputs))
        for value in values
    )


def _rate_profile(name: str, signatures: Iterable[Signature]) -> _Fit | None:
    """Return how well a profile fits; ``None`` if it knows no name, or cannot be used."""
    rules = load_rules(name)
    try:
        plans = [build_rename_plan(each, rules, TokenChange(None)) for each in signatures]
    except (RulesError, ModelError):
        return None
    pairs = [pair for plan in plans for pair in plan.pairs]
    whole = sum(len(pair.sides) == 2 or pair.may_be_alone for pair in pairs)
    unknown = sum(item.reason == REASON_UNKNOWN for plan in plans for item in plan.unchanged_names)
    duplicates = sum(len(plan.duplicates) for plan in plans)
    broken = len(pairs) - whole + unknown + duplicates
    names = frozenset[str]().union(*(plan.old_names for plan in plans))
    return _Fit(rules, whole, broken, names) if pairs else None
