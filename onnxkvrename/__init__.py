"""Give the KV-cache buffers of an exported ONNX model their token.

    >>> from onnxkvrename import rename
    >>> report = rename("model.onnx", "VLLM", output="renamed.onnx")  # doctest: +SKIP
    >>> report.status, report.names["past_key.0"]  # doctest: +SKIP
    ('renamed', 'past_key.0_VLLM')

Nothing here prints or exits. What is wrong with a model comes back as findings,
what kept the job from being done as an exception.
"""

__version__ = "0.1.0"

from onnxkvrename.checking import Finding
from onnxkvrename.discovery import find
from onnxkvrename.errors import KvRenameError, ModelError, RulesError, WriteError
from onnxkvrename.planning import Kept, Pair, Wish
from onnxkvrename.results import Job, ModelReport, Options, Report
from onnxkvrename.rules import Rules
from onnxkvrename.rulesfile import load as load_rules
from onnxkvrename.running import rename, rename_set

__all__ = [
    "Finding",
    "Job",
    "Kept",
    "KvRenameError",
    "ModelError",
    "ModelReport",
    "Options",
    "Pair",
    "Report",
    "Rules",
    "RulesError",
    "Wish",
    "WriteError",
    "__version__",
    "find",
    "load_rules",
    "rename",
    "rename_set",
]
