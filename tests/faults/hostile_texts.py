"""Sidecars and layout files that cost much to read for their size.

Each table holds functions from a size in bytes to the content of a file of about that size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from faults.hostile_inputs import KEY, VALUE, Build, series


def json_text(head: str, unit: str, tail: str) -> Build:
    """JSON with a unit again and again in its middle."""
    return lambda size: (head + unit * (size // len(unit)) + tail).encode()


def batch_io(value: Callable[[int], str]) -> Build:
    """A list of batches for the runner with a value of a size beside it."""
    return lambda size: (f'{{"IO-files": [{{"map-to": "{KEY}"}}], "x": {value(size)}}}').encode()


JSON_SIDECARS: dict[str, Build] = {
    "empty lists": batch_io(lambda size: f"[{'[],' * (size // 3)}[]]"),
    "empty objects": batch_io(lambda size: f"[{'{},' * (size // 3)}0]"),
    "numbers": batch_io(lambda size: f"[{'0,' * (size // 2)}0]"),
    "empty texts": batch_io(lambda size: "[" + '"",' * (size // 3) + "0]"),
    "different texts": batch_io(lambda size: json.dumps([f"{n}" for n in range(size // 9)])),
    "keys": batch_io(lambda size: json.dumps({f"{n}": 0 for n in range(size // 12)})),
    "one key": batch_io(lambda size: "{" + '"a":0,' * (size // 6) + '"a":0}'),
    "depth": batch_io(lambda size: "[" * (size // 2) + "]" * (size // 2)),
    "depth of objects": batch_io(lambda size: '{"a":' * (size // 5)),
    "depth of 90": batch_io(lambda size: f"[{','.join(['[' * 90 + ']' * 90] * (size // 181))}]"),
    "digits": batch_io(lambda size: "9" * size),
    "digits of a float": batch_io(lambda size: "0." + "9" * size),
    "exponent": batch_io(lambda size: "1e" + "9" * size),
    "text without an end": batch_io(lambda size: '"' + "a" * size),
    "quotes": batch_io(lambda size: '"' * size),
    "escapes": batch_io(lambda size: '"' + "\\u0061" * (size // 6) + '"'),
    "blanks": batch_io(lambda size: " " * size + "0"),
    "buffers": lambda size: json.dumps(
        {"IO-files": [{"map-to": f"past_key.{n}"} for n in range(size // 28)]}
    ).encode(),
    "no JSON": batch_io(lambda size: "a" * size),
}


CUSTOM_IO = b"".join(
    f" - IOName: {name}\n   Precision: float16\n\n".encode()
    for name in (KEY, f"{KEY}_RetainedState", VALUE, f"{VALUE}_RetainedState")
)


def yaml(unit: str, head: str = "", tail: str = "") -> Build:
    """A custom_io.yaml with text again and again at its end."""
    return lambda size: CUSTOM_IO + (head + unit * (size // len(unit)) + tail).encode()


YAML_SIDECARS: dict[str, Build] = {
    "entries": lambda size: series(
        lambda n: f" - IOName: past_key.{n}\n   Precision: float16\n\n".encode(), size
    ),
    "empty items": yaml(" -\n"),
    "items of items": yaml("- ", " - "),
    "numbers": yaml(" - 0\n"),
    "keys": lambda size: series(lambda n: f"{n}:\n".encode(), size),
    "mapping in mappings": lambda size: b"".join(
        b" " * n + b"a:\n" for n in range(int((2 * size) ** 0.5))
    ),
    "flow lists": yaml("[],", " - [", "]\n"),
    "flow mappings": yaml("{},", " - [", "]\n"),
    "flow depth": yaml("[", " - "),
    "flow keys": yaml("a: 0, ", " - {", "}\n"),
    "flow pairs": yaml("a: b: ", " - [", "]\n"),
    "question marks": yaml("? ", " - "),
    "colons": yaml(":", " - "),
    "spaced colons": yaml(": ", " - "),
    "anchors": yaml(" - &a a\n"),
    "aliases": yaml(" - *a\n", " - &a a\n"),
    "laughs": lambda size: (
        b" - &a0 [a]\n"
        + series(lambda n: f" - &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n".encode(), size)
    ),
    "tags": yaml(" - !a a\n"),
    "one tag": yaml("a", " - !", " b\n"),
    "plain text": yaml("a ", " - "),
    "plain lines": yaml("a\n   ", " - "),
    "quoted text": yaml("a ", " - '", "'\n"),
    "quoted lines": yaml("\n", " - '", "'\n"),
    "escapes": yaml("\\n", ' - "', '"\n'),
    "text without an end": yaml("a", " - '"),
    "block": yaml("   a\n", " - |\n"),
    "folded": yaml("   a\n", " - >\n"),
    "comments": yaml("#\n"),
    "blank lines": yaml("\n"),
    "blanks": yaml(" "),
    "documents": yaml("---\n"),
    "directives": lambda size: b"%YAML 1.2\n" * (size // 10),
    "digits": yaml("9", " - "),
    "question keys": yaml(" ? a\n : b\n"),
    "dashes": yaml("-", " "),
}


def layout(**more: Any) -> bytes:
    """A document of `inspect` with one layout, which has other values."""
    side = {"name": KEY, "dtype": "FLOAT", "shape": [1, 2, 8, 4]}
    content = {
        "models": ["m.onnx"],
        "layers": [],
        "sizes": {},
        "missing": [],
        "inputs": [side],
        "outputs": [{**side, "name": f"{KEY}_RetainedState"}],
        "buffers": [],
        "kept": [],
        "totals": {
            "bytes_per_token": {"context": 0, "window": 0, "encoder": 0},
            **dict.fromkeys(("state_bytes", "sequence_bytes", "batch_bytes")),
        },
        "findings": [],
        **more,
    }
    return json.dumps({"schema": "onnxkvrename.inspect/2", "layouts": [content]}).encode()


def buffer(index: int, model_path: str = "m.onnx", **more: Any) -> dict[str, Any]:
    """A buffer of a layout."""
    name = f"past_key.{index}"
    return {
        "layer": index,
        "part": "key",
        "kind": "unknown",
        "kind_guessed": False,
        "update": "untraced",
        "buffer": "past_key",
        "scope": "",
        "input": name,
        "output": f"{name}_RetainedState",
        "token": "",
        "dtype": "FLOAT",
        "shape": [1, 2],
        "sized_shape": [1, 2],
        "axes": [],
        "beside": "",
        **dict.fromkeys(("update_axis", "sequence_axis", "window", "window_size")),
        **dict.fromkeys(("bytes_per_token", "bytes_per_state", "bytes")),
        "model": model_path,
        **more,
    }


def layout_of_buffers(size: int) -> bytes:
    """A layout whose buffers, inputs, outputs and models grow together."""
    numbers = range(size // 550)
    sides = [
        [{"name": f"past_key.{n}{end}", "dtype": "FLOAT", "shape": [1, 2]} for n in numbers]
        for end in ("", "_RetainedState")
    ]
    return layout(
        models=[f"{n}.onnx" for n in numbers],
        inputs=sides[0],
        outputs=sides[1],
        buffers=[buffer(n, f"{n}.onnx") for n in numbers],
    )


LAYOUT_FILES: dict[str, Build] = {
    "buffers and models": layout_of_buffers,
    "empty lists": lambda size: layout(x=[[]] * (size // 4)),
    "empty objects": lambda size: layout(x=[{}] * (size // 4)),
    "numbers": lambda size: layout(x=[0] * (size // 3)),
    "texts": lambda size: layout(x=[""] * (size // 4)),
    "keys": lambda size: layout(x={str(n): 0 for n in range(size // 12)}),
    "sizes": lambda size: layout(sizes={str(n): 1 for n in range(size // 12)}),
    "models": lambda size: layout(models=[str(n) for n in range(size // 9)]),
    "dims": lambda size: layout(inputs=[{"name": "a", "dtype": "", "shape": [1] * (size // 3)}]),
    "findings": lambda size: layout(
        findings=[
            {"model": "", "code": "K", "severity": "error", "name": "", "message": "", "hint": ""}
        ]
        * (size // 80)
    ),
    "kept": lambda size: layout(kept=[{"name": "a", "reason": "b"}] * (size // 30)),
    "layouts": lambda size: json.dumps(
        {"schema": "onnxkvrename.inspect/2", "layouts": [{}] * (size // 4)}
    ).encode(),
    "depth": lambda size: b'{"schema":' + b"[" * size,
    "digits": lambda size: b'{"schema":' + b"9" * size + b"}",
    "digits of a float": lambda size: b'{"schema": 0.' + b"9" * size + b"}",
    "escapes": lambda size: b'{"schema": "' + b"\\u0061" * (size // 6) + b'"}',
    "text without an end": lambda size: b'{"schema": "' + b"a" * size,
    "quotes": lambda size: b"{" + b'"' * size,
    "blanks": lambda size: b"{" + b" " * size,
}
