"""The generated rows of the contract: every command with every fixture and every real export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contract.observe import REPOSITORY, ROOTS, Row

COMMANDS = {
    "rename": ("1", "{} --prefix VLLM -d out --format json"),
    "strip": ("6", "{} --strip --format json"),
    "check": ("12", "{} --target vllm-qaic --check --format json"),
    "verify": ("10", "verify {} --format json"),
    "inspect": ("11", "inspect {} --format json"),
    "target": ("10", "verify {} --target vllm-qaic --format json"),
    "compare": ("10", "compare {0} {0} --format json"),
    "pairs": ("2", "pairs {} --format json"),
}
"""Why, and what is run on each model or directory."""
IN_DEFAULT_TIER = 12
"""One of so many rows with a fixture is in the default tier."""


def build_matrix() -> dict[str, list[Row]]:
    """Build the generated rows of each group; one without its files is left out."""
    roots = {"fixtures": REPOSITORY / "fixtures", **ROOTS}
    return {group: list(_cross(group, root)) for group, root in roots.items() if root.is_dir()}


class Source(NamedTuple):
    """What a row is about.

    Attributes:
        path: A model, or a directory of models, below the directory of its group.
        copied: What of the group is copied: that model or directory, or the model's directory.
        target: What a command line calls it.
    """

    path: Path
    copied: Path
    target: Path


def list_sources(group: str, root: Path) -> list[Source]:
    """List the models and the directories of models of a group."""
    is_real = group in ROOTS
    models = sorted(path.relative_to(root) for path in root.rglob("*.onnx"))
    parents = Counter(model.parent for model in models if is_real)
    folders = {parent for parent, count in parents.items() if count > 1}
    folders |= {path for model in models for path in model.parents if path.name == "windows"}
    sources = []
    for path in [*models, *sorted(folders)]:
        # A model comes with what lies beside it, except for the fixtures in one large folder.
        alone = not is_real and path.parent.name in ("plain", "VLLM", "serving", "vlm_dual")
        copied = path if alone or path in folders else path.parent
        target = Path(path.name if copied == path else copied.name) / (
            "" if copied == path else path.name
        )
        sources.append(Source(path, copied, target))
    return sources


def _cross(group: str, root: Path) -> Iterator[Row]:
    """Build a row for each command and each model or directory of models."""
    is_real = group in ROOTS
    for position, (path, copied, target) in enumerate(list_sources(group, root)):
        given = f"copy {group + '/' if is_real else ''}{copied} {copied.name}"
        for index, (command, (why, line)) in enumerate(COMMANDS.items()):
            if command == "strip" and group == "exports":  # in a directory of QEfficient's cache
                line = f"{line} --force"
            yield Row(
                name=f"{group}/{command} {path}",
                run=line.format(target),
                why=why,
                given=(given,),
                is_slow=not is_real and (index + position) % IN_DEFAULT_TIER != 0,
            )
