"""Describe transformers.js, which computes the names of all buffers.

Source: huggingface/transformers.js, files ``packages/transformers/src/configs.js``
(``getCacheShapes``) and ``packages/transformers/src/models/modeling_utils.js``. It composes the
names of the first step's caches from the configuration of the model, and derives those of later
steps from the outputs: ``present`` becomes ``past_key_values``, and ``present_conv``,
``present_ssm``, ``present_recurrent`` become ``past_conv``, ``past_ssm``, ``past_recurrent``.
"""

from __future__ import annotations

import re

from onnxkvrename.handoff.consumer import Consumer

_STATES = ("conv", "ssm", "recurrent")
_STATE = rf"(?:{'|'.join(_STATES)})\.[0-9]+"
_PART = r"[0-9]+\.(?:(?:decoder|encoder)\.)?(?:key|value)"
_INPUT = re.compile(rf"past_key_values\.{_PART}|past_{_STATE}")
_OUTPUT = re.compile(rf"present\.{_PART}|present_{_STATE}")


def derive_input_name(name: str) -> str:
    """Return the input that gets an output's value in the next step."""
    for state in _STATES:
        name = name.replace(f"present_{state}", f"past_{state}")
    return name.replace("present", "past_key_values")


CONSUMER = Consumer(
    name="transformers-js",
    token="",
    source="huggingface/transformers.js",
    selects_input=_INPUT.fullmatch,
    selects_output=_OUTPUT.fullmatch,
    input_name_of=derive_input_name,
    needs_in_place=False,
    selected_inputs="past_key_values.N.key, past_key_values.N.value or past_conv.N",
    selected_outputs="present.N.key, present.N.value or present_conv.N",
    unselected_hint="a rename with `--strip` removes a token; without one, export the "
    "buffers with such names",
    memory="none",
    refusal="it computes the names of KV buffers in its own code and does not find others",
)
