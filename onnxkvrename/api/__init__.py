"""The functions that ``import onnxkvrename`` offers; each loads only what it needs."""
