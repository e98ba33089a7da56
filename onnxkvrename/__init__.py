"""Rename the KV-cache buffers of exported ONNX models so that vLLM can select them.

    >>> import onnxkvrename
    >>> report = onnxkvrename.rename("decoder.onnx", "VLLM", output="renamed.onnx")
    >>> report.status, report.name_map["past_key.0"]
    ('renamed', 'past_key.0_VLLM')

Nothing here prints or exits. Problems of a model are returned as findings; if the job cannot be
done, an exception is raised. Names are loaded when they are first used, so
``import onnxkvrename`` takes little time.
"""

from __future__ import annotations

__version__ = "0.1.0"
TYPE_CHECKING = False  # as in typing, which takes long to load: Ctrl-C until then is a traceback

if TYPE_CHECKING:
    from typing import Any

    from onnxkvrename.api.arguments import load_rules
    from onnxkvrename.api.files import rename, rename_all
    from onnxkvrename.api.graphs import rename_graph
    from onnxkvrename.api.layouts import (
        compare,
        compare_page,
        inspect,
        inspect_page,
        load_layout,
    )
    from onnxkvrename.api.memory import rename_bytes, rename_model
    from onnxkvrename.api.verification import find_pairs, suggest_rules, verify
    from onnxkvrename.errors import KvRenameError, ModelError, RulesError, WriteError
    from onnxkvrename.findings import CheckError, Finding
    from onnxkvrename.handoff.compare import Handoff
    from onnxkvrename.layout.inspect import ModelSummary
    from onnxkvrename.layout.layout import Layout
    from onnxkvrename.layout.load import LoadedLayout
    from onnxkvrename.rules.plan import KvPair, UnchangedName
    from onnxkvrename.rules.profile import Rules
    from onnxkvrename.rules.results import ModelReport, Report
    from onnxkvrename.verification.pairs.hidden_states import StatePair
    from onnxkvrename.verification.verify import VerifiedModel

_MODULES = {
    "api.arguments": ("load_rules",),
    "api.files": ("rename", "rename_all"),
    "api.graphs": ("rename_graph",),
    "api.memory": ("rename_bytes", "rename_model"),
    "api.layouts": (
        *("compare", "compare_page"),
        *("inspect", "inspect_page", "load_layout"),
    ),
    "api.verification": ("find_pairs", "suggest_rules", "verify"),
    "errors": ("KvRenameError", "ModelError", "RulesError", "WriteError"),
    "findings": ("CheckError", "Finding"),
    "handoff.compare": ("Handoff",),
    "layout.inspect": ("ModelSummary",),
    "layout.layout": ("Layout",),
    "layout.load": ("LoadedLayout",),
    "rules.plan": ("KvPair", "UnchangedName"),
    "rules.profile": ("Rules",),
    "rules.results": ("ModelReport", "Report"),
    "verification.pairs.hidden_states": ("StatePair",),
    "verification.verify": ("VerifiedModel",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CheckError",
    "Finding",
    "Handoff",
    "KvPair",
    "KvRenameError",
    "Layout",
    "LoadedLayout",
    "ModelError",
    "ModelReport",
    "ModelSummary",
    "Report",
    "Rules",
    "RulesError",
    "StatePair",
    "UnchangedName",
    "VerifiedModel",
    "WriteError",
    "__version__",
    "compare",
    "compare_page",
    "find_pairs",
    "inspect",
    "inspect_page",
    "load_layout",
    "load_rules",
    "rename",
    "rename_all",
    "rename_bytes",
    "rename_graph",
    "rename_model",
    "suggest_rules",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
