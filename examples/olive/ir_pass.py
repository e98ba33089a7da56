"""A pass for onnx_ir, also in an ``onnx_ir.passes.Sequential``: rename KV buffers in place."""

from __future__ import annotations

import onnx_ir
from onnx_ir.passes import InPlacePass, PassResult

import onnxkvrename


class RenameKvBuffers(InPlacePass):
    def __init__(self, token: str | None = None, *, target: str | None = None) -> None:
        self.token, self.target = token, target

    def call(self, model: onnx_ir.Model) -> PassResult:
        report = onnxkvrename.rename_graph(model, self.token, target=self.target)
        if report.failed:  # then the model is as it was
            raise ValueError(str(report))
        return PassResult(model, modified=report.status == "renamed")
