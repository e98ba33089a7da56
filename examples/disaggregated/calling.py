"""Calls of the command onnxkvrename, as a user makes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def call(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Call onnxkvrename in the root of the clone, and wait for it."""
    command = [sys.executable, "-m", "onnxkvrename", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
