"""The script people write: load, loop over the names, save."""

import onnx
from names import mapping, on_each


def rename(source: str, target: str, lazy: bool = False) -> None:
    model = onnx.load(source, load_external_data=not lazy)
    graph = model.graph
    names = mapping(value.name for value in (*graph.input, *graph.output))
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for place in (node.input, node.output):
            for index, name in enumerate(place):
                if name in names:
                    place[index] = names[name]
    onnx.save(model, target)


if __name__ == "__main__":
    on_each(rename)
