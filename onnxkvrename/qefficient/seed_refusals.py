"""Find the exports that QEfficient would not look for under their new names, and say why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import build_finding
from onnxkvrename.model.file import open_model
from onnxkvrename.qefficient.export_cache import CacheEntry, explain_token_refusal
from onnxkvrename.rules.kv_model import read_kv_model
from onnxkvrename.rules.plan import RenamePlan, TokenChange, build_rename_plan
from onnxkvrename.rules.profile import MERGED, Rules
from onnxkvrename.rules.results import ModelReport

_OLD_MERGE_FOLDER = "final_data"
"""The directory in an export where older releases put merged files, and all look for them."""


def report_refused_models(
    directory: Path, entry: CacheEntry, models: Sequence[Path], rules: Rules
) -> Iterator[ModelReport]:
    """Yield a report on each model of an export that cannot be seeded, with the reason.

    A model without KV names, such as most vision encoders, stays, and needs no word.

    Args:
        directory: The directory of the export.
        entry: The export.
        models: The models of it that the run has.
        rules: The rules that recognise KV names.

    Raises:
        ModelError: A model cannot be read.
    """
    reason = explain_token_refusal(entry.params, rules) or _explain_missing_merge(
        directory, models, rules
    )
    for model in models if reason is not None else ():
        with open_model(model) as opened:
            try:
                plan = build_rename_plan(opened.signature, rules, TokenChange(None))
            except ModelError as error:
                raise opened.source.build_error(error.message, hint=error.hint) from None
        if plan.pairs or plan.feeds:
            yield _build_report(model, plan, f"cannot be seeded: {reason}")


def report_unfed_models(models: Sequence[Path], rules: Rules) -> Iterator[ModelReport]:
    """Yield a report on each decoder whose buffers an encoder fills, which is not seeded.

    QEfficient looks for the encoder under its plain names whatever the token, so the two would
    no longer connect.

    Args:
        models: Models of exports that are to be seeded.
        rules: The rules that recognise KV names.

    Raises:
        ModelError: A model cannot be read.
    """
    for path in models:
        model = read_kv_model(path, rules, check_data=False)
        if model.needs:
            message = (
                f"cannot be seeded: QEfficient's vision encoder fills {model.needs[0]}, "
                "and that name never gets a token"
            )
            yield _build_report(path, model.plan, message)


def _build_report(path: Path, plan: RenamePlan, message: str) -> ModelReport:
    finding = build_finding("KV407", "", message, "`-d renamed` writes it to another directory")
    return ModelReport(str(path), str(path), "unchanged", pairs=plan.pairs, findings=(finding,))


def _explain_missing_merge(directory: Path, models: Sequence[Path], rules: Rules) -> str | None:
    """Return why QEfficient would not find a layerwise export, ``None`` if it would."""
    parts = {model: rules.set_rule.parse_path(model.as_posix()) for model in models}
    if None in parts.values():
        return None
    for model, part in parts.items():
        if part is not None and (part.name.stage, part.name.first_layer) == (MERGED, 0):
            folder = Path(os.path.abspath(model)).parent
            if folder in (directory, directory / _OLD_MERGE_FOLDER):
                return None
    return (
        "QEfficient reads only merged_0-N.onnx from the export's directory, not the windows or "
        "pref_0.onnx"
    )
