"""Give the KV-cache buffers of an exported ONNX model their token.

    >>> from onnxkvrename import rename
    >>> report = rename("model.onnx", "VLLM", output="renamed.onnx")  # doctest: +SKIP
    >>> report.status, report.names["past_key.0"]  # doctest: +SKIP
    ('renamed', 'past_key.0_VLLM')

Nothing here prints or exits. What is wrong with a model comes back as findings,
what kept the job from being done as an exception.
"""

__version__ = "0.1.0"

from onnxkvrename.api import rename
from onnxkvrename.errors import KvRenameError, ModelError, RulesError, WriteError
from onnxkvrename.findings import Finding
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.load import load_rules as load_rules
from onnxkvrename.rules.plan import KvPair, TokenChange, UnchangedName
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, Options, RenameJob, Report

__all__ = [
    "Finding",
    "RenameJob",
    "UnchangedName",
    "KvRenameError",
    "ModelError",
    "ModelReport",
    "Options",
    "KvPair",
    "Report",
    "Rules",
    "RulesError",
    "TokenChange",
    "WriteError",
    "__version__",
    "find_jobs",
    "load_rules",
    "rename",
    "rename_batch",
]
