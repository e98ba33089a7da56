"""A model at work: onnxruntime in the place of an accelerator that keeps the buffers."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # an example has nothing to report
import onnxruntime

_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class Device:
    """One graph, and the buffers that it retains: each ``X_RetainedState`` is the next ``X``.

    ``sizes`` are those of the symbolic dimensions, as a specialization gives them.
    """

    def __init__(self, path: str, sizes: Mapping[str, int]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4  # what it raises says it
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.outputs = [value.name for value in self._session.get_outputs()]
        retained = [value for value in self._session.get_inputs() if self._retained(value.name)]
        self.symbols = {d for value in retained for d in value.shape if isinstance(d, str)}
        if missing := ", ".join(sorted(self.symbols - sizes.keys())):
            raise ValueError(f"no size is known of {missing}")
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
        """Feed tokens, the first at position ``start``; the most likely next token."""
        positions = range(start, start + len(tokens))
        feeds = {"input_ids": np.array([tokens]), "position_ids": np.array([positions])}
        results = self._session.run(self.outputs, {**feeds, **self.buffers})
        named = dict(zip(self.outputs, results, strict=True))
        self.buffers = {name: named[self._retained(name)] for name in self.buffers}
        return int(named["logits"][0, -1].argmax())

    def generate(self, first: int, start: int, count: int) -> list[int]:
        """Go on from a token at position ``start``, one token at a time."""
        tokens = [first]
        for position in range(start, start + count - 1):
            tokens.append(self.run([tokens[-1]], position))
        return tokens

    def _retained(self, name: str) -> str:
        """The output that comes back as this input, or nothing."""
        candidates = (f"{name}_RetainedState", f"{name}_output")
        return next((output for output in candidates if output in self.outputs), "")
