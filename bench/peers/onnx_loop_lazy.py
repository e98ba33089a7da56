"""The same script without reading external data."""

from names import on_each
from onnx_loop import rename

if __name__ == "__main__":
    on_each(lambda source, target: rename(source, target, lazy=True))
