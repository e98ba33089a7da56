"""Describe NPUW, OpenVINO's NPU plugin for language models, which pairs names by replacement.

Source: openvinotoolkit/openvino, directory ``src/plugins/intel_npu/src/plugin/npuw``, files
``llm_infer_request.cpp`` at 002caac (``init_past_name_lists``, ``copy_kvcache``,
``copy_lincache``), ``infer_request_utils.cpp`` at 0da08e8 (``copy_by_planes``). NPUW makes two
models from one: for prefill and to generate. It finds the output of each input by replacing
``past_key_values`` with ``present`` (in names of linear states, ``past`` with ``present``), and
copies it to that input of the other model. If an output is missing, it throws an exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from onnxkvrename.findings import Finding, begin_message, build_finding, report_names
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import ConsumerView

_PAST, _PRESENT = "past_key_values", "present"
_INPUT = re.compile(rf"{_PAST}|cache_params\.past\.(?:conv|ssm)\.[0-9]+")
_LINEAR_PRESENT = r"cache_params\.present\.(?:conv|ssm)\.[0-9]+"
_OUTPUT = re.compile(rf"{_PRESENT}|{_LINEAR_PRESENT}")
_RANK = 4


def derive_input_name(name: str) -> str:
    """Return the name of the input that an output belongs to."""
    if re.match(_LINEAR_PRESENT, name):
        return name.replace(_PRESENT, "past")
    return name.replace(_PRESENT, _PAST)


def check_copied_axes(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV610 for inputs that do not have four axes, KV605 for states that have them.

    Every input that begins with ``past_key_values`` is copied like keys and values.
    """
    name = view.consumer.name
    inputs = [each for each in view.selection.inputs if each.value.name.startswith(_PAST)]
    names = [each.value.name for each in inputs if len(each.value.shape or ()) not in (0, _RANK)]
    yield from report_names(
        "KV610",
        names,
        ("does", "do"),
        f"not have four axes; {name} copies every input that begins with {_PAST} as "
        "[1, heads, tokens, head size]",
        "export keys and values with these axes, and states with other names",
        "inputs",
    )
    states = [
        each.value.name
        for each in inputs
        if each.buffer is not None and each.buffer.is_state and each.value.name not in names
    ]
    if states:
        yield build_finding(
            "KV605",
            states[0],
            f"{begin_message(states, 'is a state', 'are states', 'inputs')}; {name} copies only as "
            "many rows of axis 2 as there are tokens, and the rest is lost",
            "export states with other names",
        )


CONSUMER = Consumer(
    name="openvino-npuw",
    token="",
    source="openvinotoolkit/openvino at 002caac",
    selects_input=_INPUT.match,
    selects_output=_OUTPUT.match,
    input_name_of=derive_input_name,
    needs_in_place=False,
    selected_inputs=f"{_PAST}* or cache_params.past.*",
    selected_outputs=f"{_PRESENT}* or cache_params.present.*",
    memory="none",
    checks=(check_copied_axes,),
)
