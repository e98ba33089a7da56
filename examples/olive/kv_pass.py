"""A pass for Olive: rename the KV-cache buffers for a consumer, and check the result.

    PYTHONPATH=. olive run --config workflow.json --package-config package.json

Put it last: passes that know a cache by its name look for the names that the exporter gave.
"""

from __future__ import annotations

from pathlib import Path

from olive.hardware import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.pass_config import BasePassConfig, PassConfigParam

import onnxkvrename


class RenameKvBuffers(Pass):
    """Rename KV-cache buffers; weights are copied, never read."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "target": PassConfigParam(
                type_=str,
                default_value=None,
                description="The consumer of the buffers, such as vllm-qaic, whose token is used.",
            ),
            "token": PassConfigParam(
                type_=str, default_value=None, description="The token, if there is no target."
            ),
            "rules": PassConfigParam(
                type_=str,
                default_value=None,
                description="The profile of the exporter, or a rules file; by default the one "
                "that knows the names.",
            ),
        }

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        output = Path(resolve_onnx_path(output_model_path, Path(model.model_path).name))
        report = onnxkvrename.rename(
            model.model_path,
            config.token,
            target=config.target,
            rules=config.rules,
            output=output,
            verify=True,  # each buffer is retained, and onnx accepts the model
        )
        if report.failed:  # then nothing was written
            raise ValueError(str(report))
        # Olive saves a folder whole, and of a file only the file: without its external data.
        return ONNXModelHandler(str(output.parent), output.name)
