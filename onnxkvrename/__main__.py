"""``python -m onnxkvrename``."""

from onnxkvrename.cli import run

run()
