"""onnx-ir: values are objects here too; external data stays where it is."""

import onnx_ir as ir
from names import on_each, renamed


def rename(source: str, target: str) -> None:
    model = ir.load(source)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = renamed(value.name or "")
    ir.save(model, target)


if __name__ == "__main__":
    on_each(rename)
