"""``inference_metadata.yaml``: how onnx-genai binds the inputs and outputs of mobius' models.

Names are lists, and entries with shapes:
https://github.com/onnxruntime/mobius
"""

from __future__ import annotations

import re

from onnxkvrename.sidecars.format import SidecarFormat
from onnxkvrename.sidecars.sections import find_texts
from onnxkvrename.sidecars.yaml_tree import parse_yaml_tree

FORMAT = SidecarFormat(
    caption="inference metadata",
    priority=70,
    expected_form="model, and in it io with the names of inputs and outputs",
    parse=parse_yaml_tree,
    find_names=find_texts,
    file_name_pattern=re.compile(r"inference_metadata\.ya?ml"),
    effect="onnx-genai does not find these inputs and outputs",
    is_binding=True,
    is_package=True,
    reader="onnx-genai",
)
