"""onnx-graphsurgeon without reading external data."""

from graphsurgeon import rename
from names import on_each

if __name__ == "__main__":
    on_each(lambda source, target: rename(source, target, lazy=True))
