"""TODO"""

from __future__ import annotations

import os
from pathlib import Path

from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.find_models import build_job
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, Options


def rename(
    model: str | os.PathLike[str],
    token: str | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: Rules | None = None,
    options: Options | None = None,
) -> ModelReport:
    """Rename."""
    job = build_job(Path(model), None if output is None else Path(output))
    change = TokenChange(token, strip=strip, replace=replace, normalize=normalize)
    (report,) = rename_batch([job], change, rules or load_rules(), options).models
    if report.error is not None:
        raise report.error
    return report
