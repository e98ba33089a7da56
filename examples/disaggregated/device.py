"""Run a model: onnxruntime instead of an accelerator that keeps the buffers."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # an example does not report anything
import onnxruntime

_NO_POSITION = "2147483647"
"""The index of a missing position in exports for AIC; a device returns zeros for it."""
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class Device:
    """A graph, and the buffers that it retains: each output ``X_RetainedState`` is the next ``X``.

    Args:
        path: The model.
        sizes: Sizes of the symbolic dimensions, as in a specialization.

    Raises:
        ValueError: A symbolic dimension of a buffer has no size.
    """

    def __init__(self, path: str, sizes: Mapping[str, int]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4  # its errors are reported here
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.outputs = [value.name for value in self._session.get_outputs()]
        retained = [value for value in self._session.get_inputs() if self._retained(value.name)]
        self.symbols = {d for value in retained for d in value.shape if isinstance(d, str)}
        if missing := ", ".join(sorted(self.symbols - sizes.keys())):
            raise ValueError(f"no size for {missing}: pass --dim SYMBOL=SIZE")
        self._empty = {
            value.name: np.zeros([sizes.get(d, d) for d in value.shape], _DTYPES[value.type])
            for value in retained
        }
        self.buffers: dict[str, np.ndarray] = {}
        self.reset()

    def reset(self) -> None:
        """Begin a new sequence, with empty buffers."""
        self.buffers = {name: empty.copy() for name, empty in self._empty.items()}

    def run(self, tokens: list[int], start: int) -> int:
        """Feed tokens, the first at position ``start``; return the most likely next token."""
        positions = range(start, start + len(tokens))
        feeds = {"input_ids": np.array([tokens]), "position_ids": np.array([positions])}
        try:
            results = self._session.run(self.outputs, {**feeds, **self.buffers})
        except Exception as error:  # onnxruntime's own have nothing else in common
            if _NO_POSITION in str(error):
                raise ValueError(
                    f"onnxruntime cannot run this export: its CtxGather reads index {_NO_POSITION},"
                    " which only an AIC device accepts; fixtures/plain/serving has models that run"
                ) from None
            raise
        named = dict(zip(self.outputs, results, strict=True))
        self.buffers = {name: named[self._retained(name)] for name in self.buffers}
        return int(named["logits"][0, -1].argmax())

    def generate(self, first: int, start: int, count: int) -> list[int]:
        """Generate tokens, one at a time, beginning with ``first`` at position ``start``."""
        tokens = [first]
        for position in range(start, start + count - 1):
            tokens.append(self.run([tokens[-1]], position))
        return tokens

    def _retained(self, name: str) -> str:
        """Return the output that becomes this input in the next step; empty if there is none."""
        candidates = (f"{name}_RetainedState", f"{name}_output")
        return next((output for output in candidates if output in self.outputs), "")
