"""Runs ``action.yml`` and pieces of shell as a CI system does, with nothing from a network."""

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
    """Where steps run: the working directory, one for temporary files, and PATH's first one."""

    workspace: Path
    temp: Path
    tools: Path

    def tool(self, name: str, script: str) -> Path:
        """Put an executable on PATH."""
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        path.chmod(0o755)
        return path

    def shell(
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
    """What a step with ``uses:`` came to."""

    code: int
    out: str
    err: str
    outputs: dict[str, str]


def machine(root: Path) -> Machine:
    """A machine with this Python and the command on PATH; temporary files behind a blank."""
    made = Machine(root / "workspace", root / "temporary files", root / "tools")
    for directory in made:
        directory.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    made.tool("python3", f'exec {python} "$@"')
    made.tool("onnxkvrename", f'exec {python} -m onnxkvrename "$@"')
    return made


def use(machine: Machine, given: Mapping[str, str], action: Path = ROOT, **env: str) -> Outcome:
    """Run the action with these inputs, each step in its shell until one fails."""
    known = {
        ("inputs", name, ""): given.get(name, meaning.get("default", ""))
        for name, meaning in ACTION["inputs"].items()
    }
    code, out, err = 0, "", ""
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        said = machine.temp / f"output of {step['id']}"
        said.touch()
        process = machine.shell(
            step["run"],
            shell="bash --noprofile --norc -e -o pipefail",
            GITHUB_ACTION_PATH=str(action),
            GITHUB_OUTPUT=str(said),
            **{name: _filled(value, known) for name, value in step.get("env", {}).items()},
            **env,
        )
        code, out, err = process.returncode, out + process.stdout, err + process.stderr
        for line in said.read_text("utf-8").splitlines():
            name, _, value = line.partition("=")
            known["steps", step["id"], name] = value
        said.unlink()
        if code:
            break
    outputs = {name: _filled(how["value"], known) for name, how in ACTION["outputs"].items()}
    return Outcome(code, out, err, outputs)


def _filled(text: str, known: Mapping[tuple[str, str, str], str]) -> str:
    return _EXPRESSION.sub(lambda found: known.get((found[1], found[2], found[3] or ""), ""), text)
