"""One virtual environment per peer, pinned by `peers/*.txt`, and one for onnxkvrename."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent
PEERS = BENCH / "peers"
OURS = "onnxkvrename"
NAMES = tuple(sorted(path.stem for path in PEERS.glob("*.txt")))


@dataclass(frozen=True)
class Environments:
    root: Path

    def python(self, name: str) -> str:
        return self.program(name, "python")

    def program(self, name: str, program: str) -> str:
        return str(self.root / name / "bin" / program)

    def versions(self) -> dict[str, dict[str, str]]:
        return {name: self._installed(name) for name in (OURS, *NAMES)}

    def _installed(self, name: str) -> dict[str, str]:
        listing = _pip(self.python(name), "list", "--format", "json")
        packages = json.loads(listing)
        return {entry["name"]: entry["version"] for entry in packages if entry["name"] != "pip"}


def prepare(root: Path, tool: str) -> Environments:
    """Make what is missing; `tool` is what to install as onnxkvrename, and is always installed."""
    environments = Environments(root)
    for name in NAMES:
        pins = (PEERS / f"{name}.txt").read_bytes()
        stamp = root / name / "pins"
        wanted = hashlib.sha256(pins + sys.version.encode()).hexdigest()
        if not stamp.exists() or stamp.read_text() != wanted:
            _say(f"environment {name}")
            _create(root / name)
            _pip(environments.python(name), "install", "-r", str(PEERS / f"{name}.txt"))
            stamp.write_text(wanted)
    _say(f"environment {OURS}, from {tool}")
    _create(root / OURS)
    _pip(environments.python(OURS), "install", tool)
    if not Path(environments.program(OURS, OURS)).exists():
        raise SystemExit(f"{tool} installs no command called {OURS}")
    return environments


def _create(at: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(at)], check=True)


def _pip(python: str, *arguments: str) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip {' '.join(arguments)} failed:\n{done.stderr.strip()}")
    return done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
