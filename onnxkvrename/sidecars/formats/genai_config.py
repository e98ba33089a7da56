"""``genai_config.json``: how onnxruntime-genai binds the inputs and outputs of its models.

Names are templates (``"past_key_names": "past_key_values.%d.key"``) or, in a pipeline, lists.
Templates are read in the inputs and outputs of a model's section, and nowhere else. A key that is
left out has a default, which is not in the file, so no rename can change it:
https://github.com/microsoft/onnxruntime-genai/blob/main/src/config.h
"""

from __future__ import annotations

import re

from onnxkvrename.sidecars.format import SidecarFormat
from onnxkvrename.sidecars.json_tree import parse_json_tree
from onnxkvrename.sidecars.sections import find_texts

_INPUTS, _OUTPUTS = "model.decoder.inputs", "model.decoder.outputs"
_CROSS_OUTPUTS = "model.encoder.outputs"


def _reads_template(keys: tuple[str, ...]) -> bool:
    """Return whether a template is in ``model.SECTION.inputs`` or ``outputs``, on its own side."""
    if len(keys) != 4 or keys[0] != "model":
        return False
    key = keys[3].removeprefix("cross_")
    other_side = {"inputs": "present_", "outputs": "past_"}.get(keys[2])
    return other_side is not None and not key.startswith(other_side)


FORMAT = SidecarFormat(
    caption="a configuration of onnxruntime-genai",
    priority=60,
    expected_form="model, and in it decoder with inputs and outputs",
    parse=parse_json_tree,
    find_names=find_texts,
    file_name_pattern=re.compile(r"genai_config\.json"),
    effect="onnxruntime-genai fails at the first token",
    is_binding=True,
    is_package=True,
    reader="onnxruntime-genai",
    default_names=(
        ("past_key_names", _INPUTS, "past_key_values.%d.key"),
        ("past_value_names", _INPUTS, "past_key_values.%d.value"),
        ("past_conv_names", _INPUTS, "past_key_values.%d.conv_state"),
        ("past_recurrent_names", _INPUTS, "past_key_values.%d.recurrent_state"),
        ("present_key_names", _OUTPUTS, "present.%d.key"),
        ("present_value_names", _OUTPUTS, "present.%d.value"),
        ("present_conv_names", _OUTPUTS, "present.%d.conv_state"),
        ("present_recurrent_names", _OUTPUTS, "present.%d.recurrent_state"),
        ("past_conv_names", _INPUTS, "past_conv.%d"),  # until 0.17
        ("present_conv_names", _OUTPUTS, "present_conv.%d"),
        ("cross_present_key_names", _CROSS_OUTPUTS, "present_key_cross_%d"),
        ("cross_present_value_names", _CROSS_OUTPUTS, "present_value_cross_%d"),
    ),
    reads_template=_reads_template,
    max_name_bytes=63,
)
