"""onnxruntime's OnnxModel, the helper its own transformer optimizer renames with."""

import onnx
from names import mapping, on_each
from onnxruntime.transformers.onnx_model import OnnxModel


def rename(source: str, target: str) -> None:
    model = OnnxModel(onnx.load(source))
    graph = model.graph()
    for old, new in mapping(value.name for value in graph.output).items():
        model.rename_graph_output(old, new)
    for old, new in mapping(value.name for value in graph.input).items():
        model.replace_input_of_all_nodes(old, new)
        model.find_graph_input(old).name = new
    OnnxModel.save(model.model, target)


if __name__ == "__main__":
    on_each(rename)
