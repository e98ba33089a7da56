"""The retention loop in onnxruntime, in a process of its own: the process, its limits, the loop."""
