"""``metadata.json`` of a bundle for QNN: the inputs and outputs of each of its graphs.

Qualcomm AI Hub writes the file beside the graphs, and programs that run a bundle by themselves read
shapes and types in it by name: https://github.com/quic/ai-hub-models
"""

from __future__ import annotations

import re

from onnxkvrename.sidecars.format import SidecarFormat
from onnxkvrename.sidecars.json_tree import parse_json_tree
from onnxkvrename.sidecars.sections import find_texts

FORMAT = SidecarFormat(
    caption="bundle metadata",
    priority=80,
    expected_form="model_files, and in it inputs and outputs by name",
    parse=parse_json_tree,
    find_names=find_texts,
    markers=(b'"model_files"',),
    search_pattern=re.compile(r"metadata\.json"),
    effect="a program that reads the bundle does not find these inputs and outputs",
    is_binding=True,
    reader="a program that runs the bundle",
)
