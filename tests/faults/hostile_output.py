"""Texts that terminals and CI runners act on, models full of them, and what recognises them.

The judge knows the rules of terminals and runners by itself, and none of the package's.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import onnx.helper
from models import info, node, saved
from onnx import TensorProto

COMMANDS = (
    "::stop-commands::x",
    "  ::error title=a::b",
    "##[error]x",
    "##vso[task.setvariable variable=a]b",
    "##teamcity[buildStatus text='x']",
)
CONTROLS = (
    "\n::error::x",
    "\r::error::x",
    "\r\n##[group]x",
    "\x1b[2J",
    "\x1b[8mhidden",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\",
    "\x9b31m",
    "\x85::error::x",
    "\u2028::error::x",
    "\u202eab\u2066",
    "\u200b\ufeff\u061c",
    "\U000e0041",
    "section_start:1:x\r\x1b[0K",
    "\x00\x7f",
)
MARKUP = "[red][/red][link=x]:smiley:{x}%s\\"
HOSTILE_TEXTS = (*COMMANDS, *CONTROLS, MARKUP)

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u3164\ufe0f\uffa0")
_OWN_COMMAND = re.compile(r"::(error|warning|notice) (file=[^:,]*,)?title=[^:,]*::")


def find_active_text(text: str, *, styled: bool = False, annotates: bool = False) -> list[str]:
    """Return what a terminal or a runner would act on.

    Args:
        text: All that was printed on a stream.
        styled: Whether colours are expected.
        annotates: Whether each line is expected to be one of GitHub's commands.
    """
    plain = _STYLE.sub("", text) if styled else text
    active = []
    for line in _LINE_END.split(plain):
        body = line
        if annotates and (own := _OWN_COMMAND.match(line)):
            body = "-" + line[own.end() :]
        if body.lstrip().startswith("::") or re.search(r"##\w*\[", body):
            active.append(line)
    active += [
        f"U+{ord(char):04X}"
        for char in sorted(set(plain) - {"\n"})
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        or char in _INVISIBLE
    ]
    return active


def save_hostile_model(path: Path, text: str) -> Path:
    """Write a decoder that says `text` wherever a model can say something."""
    key, value = f"{text}/past_key.0", f"{text}/past_value.0"
    key_out, value_out = f"{key}_RetainedState", f"{value}_RetainedState"
    shape = (text, 2, f"{text}ctx_len", 4)
    inputs = [info("x", *shape), info(key, *shape), info(value, *shape)]
    outputs = [info("logits", *shape), info(key_out, *shape), info(value_out, *shape)]
    outputs += [info(f"{text}_RetainedState"), info(f"vision_{text}_RetainedState")]
    nodes = [
        node(text, ["x", key], [key_out], name=text, domain=text),
        node("Add", [value, "x"], [value_out], name=text, doc_string=text),
        node("Add", [key_out, value_out], ["logits"]),
        *(node("Neg", ["x"], [each.name], name=text) for each in outputs[3:]),
    ]
    graph = onnx.helper.make_graph(nodes, text, inputs, outputs, doc_string=text)
    weight = graph.initializer.add(name=text, data_type=TensorProto.FLOAT, dims=[2])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=text)
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(text, 1)]
    model = onnx.helper.make_model(
        graph, opset_imports=opsets, ir_version=10, producer_name=text, producer_version=text
    )
    onnx.helper.set_model_props(model, {text: text})
    return saved(model, path)
