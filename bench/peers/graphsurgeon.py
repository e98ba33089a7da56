"""onnx-graphsurgeon: values are objects, so renaming the graph's ends renames every use."""

import onnx
import onnx_graphsurgeon as gs
from names import on_each, renamed


def rename(source: str, target: str, lazy: bool = False) -> None:
    graph = gs.import_onnx(onnx.load(source, load_external_data=not lazy))
    for value in (*graph.inputs, *graph.outputs):
        value.name = renamed(value.name)
    onnx.save(gs.export_onnx(graph), target)


if __name__ == "__main__":
    on_each(rename)
