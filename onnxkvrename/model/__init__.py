"""An ONNX file as bytes: where names stand, and how they are exchanged."""
