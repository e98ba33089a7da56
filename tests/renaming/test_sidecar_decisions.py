"""The table of what becomes of a sidecar: each row as a case of the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from custom_io_files import format_custom_io

from onnxkvrename.renaming import prepare_sidecars
from onnxkvrename.sidecars.decisions import DECISIONS, Decision, Fact, decide

MODEL, SIDECAR, CONFIG = "decoder.onnx", "custom_io.yaml", "genai_config.json"
COMPILED = f"qpc-0123456789abcdef/{SIDECAR}"
NAMES = [f"past_{part}.{layer}" for layer in (0, 1) for part in ("key", "value")]


def custom_io(names: list[str], token: str = "") -> str:
    return format_custom_io([(f"{n}{token}", f"{n}{token}_RetainedState") for n in names], "mxint8")


def config(*names: str, filename: str = MODEL) -> str:
    return json.dumps({"model": {"decoder": {"filename": filename, "names": names}}})


PLAIN, OTHER, FOREIGN = custom_io(NAMES), custom_io(NAMES, "_OTHER"), custom_io(["k_pe.0"])
WHOLE = config(*NAMES, *(f"{name}_RetainedState" for name in NAMES))
TORN = "- IOName: ["


class Case(NamedTuple):
    """A sidecar, what else is there, and the options; the exit code, and the codes of findings."""

    facts: tuple[Fact, ...]
    text: str
    options: str = ""
    code: int = 0
    findings: tuple[str, ...] = ()
    name: str = SIDECAR
    there: Callable[[], object] = lambda: None


def link() -> None:
    os.link(SIDECAR, "io")


def tear_model() -> None:
    Path(MODEL).write_bytes(Path(MODEL).read_bytes()[:-40])


WARNED, REFUSED = ("warning KV406",), ("error KV406",)
CASES = [
    Case(("asked", "beside both"), PLAIN, f"--sidecar {SIDECAR} -o new.onnx", 2),
    Case(("of an unread model",), PLAIN, "", 2, there=tear_model),
    Case(("of a compile",), PLAIN, "", 0, WARNED, COMPILED),
    Case(("unreadable", "off"), TORN, "--sidecars off", 0, WARNED),
    Case(("unreadable", "found", "known by content"), TORN, name="io.yaml"),
    Case(("unreadable", "found", "of no buffers"), TORN, "--profile qnn", 1, ("error KV001",)),
    Case(("unreadable", "found"), TORN, "", 2),
    Case(("unwritable", "found"), PLAIN, "", 2, there=link),
    Case(("unreadable",), TORN, f"--sidecar {SIDECAR}", 2),
    Case(("unwritable",), PLAIN, f"--sidecar {SIDECAR}", 2, there=link),
    Case(("beside both", "of another token"), OTHER, "-o new.onnx", 0, WARNED),
    Case(("beside both", "stale"), PLAIN, "-o new.onnx --sidecars off", 0, WARNED),
    Case(("off", "refused", "stale"), config(NAMES[0]), "--sidecars off", 0, WARNED, CONFIG),
    Case(("off", "stale"), PLAIN, "--sidecars off", 0, WARNED),
    Case(("off",), FOREIGN, "--sidecars off"),
    Case(("found", "shared"), PLAIN, "", 0, WARNED, there=lambda: shutil.copy(MODEL, "other.onnx")),
    Case(("found", "refused"), OTHER, "", 1, REFUSED),
    Case(("refused",), OTHER, f"--sidecar {SIDECAR}", 1, REFUSED),
    Case(("found", "misplaced"), WHOLE, "-o new/x.onnx", 0, WARNED, CONFIG),
    Case(("found", "nameless", "a binding"), config("x", filename="far.onnx"), name=CONFIG),
    Case(("found", "nameless"), FOREIGN, "", 0, ("warning KV404",)),
    Case(("foreign",), FOREIGN, f"--sidecar {SIDECAR}", 1, ("error KV404",)),
    Case(("misplaced",), WHOLE, f"--sidecar {CONFIG} -o new/x.onnx", 1, REFUSED, CONFIG),
    Case((), PLAIN),
]


@pytest.mark.parametrize(
    ("case", "row"),
    list(zip(CASES, DECISIONS, strict=True)),
    ids=[", ".join(c.facts) for c in CASES],
)
def test_a_row_decides(
    case: Case, row: Decision, decoder: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows has the new names, what is left stays, and what refuses changes no file."""
    monkeypatch.chdir(decoder.parent)
    path = Path(case.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(case.text)
    case.there()
    before = Path(MODEL).read_bytes()
    taken: list[Decision] = []

    def note(facts: set[Fact]) -> Decision:
        decision = decide(facts)
        if "unwritable" not in facts or case.facts[:1] == ("unwritable",):
            taken.append(decision)
        return decision

    monkeypatch.setattr(prepare_sidecars, "decide", note)
    outcome = run(MODEL, "--prefix", "VLLM", *case.options.split())
    assert outcome.code == case.code
    assert tuple(re.findall(r"(?:warning|error) KV\d+", outcome.err)) == case.findings
    assert case.facts == row.facts
    assert taken[-1] == row
    follows = row.verdict == "follow" and not case.findings
    is_copied = "of a folder" in case.facts
    assert path.read_text() == (
        custom_io(NAMES, "_VLLM") if follows and not is_copied else case.text
    )
    assert Path("new", case.name).exists() is is_copied
    if row.verdict == "refuse":
        assert Path(MODEL).read_bytes() == before
        assert not any(Path(new).exists() for new in ("new", "new.onnx"))
