"""A machine that runs ``action.yml`` and shell scripts as a CI system does, without a network."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
_EXPRESSION = re.compile(r"\$\{\{ (inputs|steps)\.([\w-]+)(?:\.outputs\.([\w-]+))? \}\}")


class Machine(NamedTuple):
    """The directories of a machine on which steps run.

    Attributes:
        workspace: The working directory.
        temp: For temporary files; it is the home directory, too.
        tools: The first directory of PATH.
    """

    workspace: Path
    temp: Path
    tools: Path

    def add_tool(self, name: str, script: str) -> Path:
        """Put an executable on PATH."""
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        path.chmod(0o755)
        return path

    def run_script(
        self, script: str, *args: str, shell: str = "bash", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script from a file, with an environment that holds little but what is given."""
        path = self.temp / "script.sh"
        path.write_text(script, "utf-8")
        return subprocess.run(
            [*shlex.split(shell), str(path), *args],
            cwd=self.workspace,
            env={
                "PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(self.temp),
                "LC_ALL": "C.UTF-8",
                "RUNNER_TEMP": str(self.temp),
                **env,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )


class Outcome(NamedTuple):
    """Exit code, output and outputs of a step with ``uses:``, and its summary in Markdown."""

    code: int
    out: str
    err: str
    outputs: dict[str, str]
    summary: str


def build_machine(root: Path) -> Machine:
    """Make a machine with this Python and the command on PATH, and a blank in its paths."""
    machine = Machine(root / "workspace", root / "temporary files", root / "tools")
    for directory in machine:
        directory.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    machine.add_tool("python3", f'exec {python} "$@"')
    machine.add_tool("onnxkvrename", f'exec {python} -m onnxkvrename "$@"')
    return machine


def run_action(
    machine: Machine, inputs: Mapping[str, str], action: Path = ROOT, **env: str
) -> Outcome:
    """Run the action with these inputs, each step in its shell until one fails."""
    known = {
        ("inputs", name, ""): inputs.get(name, meaning.get("default", ""))
        for name, meaning in ACTION["inputs"].items()
    }
    code, out, err = 0, "", ""
    summary_file = machine.temp / "summary of the steps"
    summary_file.write_bytes(b"")
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        output_file = machine.temp / f"output of {step['id']}"
        output_file.touch()
        process = machine.run_script(
            step["run"],
            shell="bash --noprofile --norc -e -o pipefail",
            GITHUB_ACTION_PATH=str(action),
            GITHUB_OUTPUT=str(output_file),
            **{"GITHUB_STEP_SUMMARY": str(summary_file), **env},
            **{name: _fill_in(value, known) for name, value in step.get("env", {}).items()},
        )
        code, out, err = process.returncode, out + process.stdout, err + process.stderr
        for line in output_file.read_text("utf-8").splitlines():
            name, _, value = line.partition("=")
            known["steps", step["id"], name] = value
        output_file.unlink()
        if code:
            break
    outputs = {name: _fill_in(how["value"], known) for name, how in ACTION["outputs"].items()}
    return Outcome(code, out, err, outputs, summary_file.read_text("utf-8"))


def _fill_in(text: str, known: Mapping[tuple[str, str, str], str]) -> str:
    return _EXPRESSION.sub(lambda match: known.get((match[1], match[2], match[3] or ""), ""), text)
