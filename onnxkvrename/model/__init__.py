"""An ONNX file as bytes: where names occur, and how they are exchanged."""
