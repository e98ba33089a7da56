"""Several writers and readers on one set of models: whatever is read is whole.

Writers rename and strip the same set in place, in processes of their own, as fast as
they can; readers read the files all the while. Each file that is read must be one of those that
the commands lead to, one after the other; the weights never change; and a writer succeeds or
says why not.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from faults.commands import BESIDE, INSIDE, WEIGHTS, write_files
from faults.controls import write_in_place
from faults.judging import in_memory
from soak.parts import Part

from onnxkvrename.cli.main import main

WRITERS, READERS = 6, 2
COMMANDS = (
    "in --prefix VLLM --replace",
    "in --prefix OTHER --replace",
    "in --strip",
)
REASONS = ("is being processed by", "was changed by another program")
"""What a writer may be refused for."""
SET_FILES = {"in/m.onnx": BESIDE, "in/n.onnx": INSIDE, "in/sub/o.onnx": INSIDE, "in/w.bin": WEIGHTS}
SECONDS = 10


def run_quietly(args: str) -> tuple[int, str]:
    """Run a command line in the working directory; return its exit code and stderr."""
    err = StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(err):
        code = main(args.split())
    return code, err.getvalue()


def list_contents(directory: Path) -> dict[str, set[str]]:
    """Return the digests that each file can have: all that the commands lead to."""
    os.chdir(directory)
    states, pending = set(), [tuple(SET_FILES.values())]
    while pending:
        state = pending.pop()
        if state in states:
            continue
        states.add(state)
        for args in COMMANDS:
            write_files(directory, dict(zip(SET_FILES, state, strict=True)))
            run_quietly(args)
            pending.append(tuple((directory / name).read_bytes() for name in SET_FILES))
    write_files(directory, SET_FILES)
    return {
        name: {hashlib.sha256(state[number]).hexdigest() for state in states}
        for number, name in enumerate(SET_FILES)
    }


def write_again_and_again(seed: int, deadline: float, log: Path) -> None:
    """Run commands until the time is up, and write down what came of them."""
    chooser, outcomes, problems = random.Random(seed), Counter[str](), []
    while time.monotonic() < deadline:
        code, err = run_quietly(chooser.choice(COMMANDS))
        if code in (0, 1):
            outcomes["written"] += 1
        elif code == 2 and any(reason in err for reason in REASONS):
            outcomes["refused"] += 1
        else:
            problems.append(f"exit code {code}: {err}")
    log.write_text(json.dumps([outcomes, problems]))


def read_again_and_again(
    contents: dict[str, set[str]], seed: int, deadline: float, log: Path
) -> None:
    """Read files until the time is up, and write down those that are not whole."""
    chooser, outcomes, problems = random.Random(seed), Counter[str](), []
    while time.monotonic() < deadline:
        name = chooser.choice(list(SET_FILES))
        try:
            data = Path(name).read_bytes()
        except OSError as error:
            problems.append(f"{name}: {error}")
            continue
        outcomes["read"] += 1
        if hashlib.sha256(data).hexdigest() not in contents[name]:
            problems.append(f"{name} is torn: {len(data)} bytes")
    log.write_text(json.dumps([outcomes, problems]))


def race(
    part: Part, seed: int, seconds: float, break_program: Callable[[], None] | None = None
) -> list[str]:
    """Let writers and readers race for some seconds, and return what went wrong."""
    problems: list[str] = []
    before = Path.cwd()
    with in_memory() as root, tempfile.TemporaryDirectory() as logs:
        try:
            contents = list_contents(root)
            deadline = time.monotonic() + seconds
            children = []
            for number in range(WRITERS + READERS):
                child = os.fork()
                if child == 0:
                    try:
                        signal.alarm(int(seconds) + 120)
                        if break_program is not None:
                            break_program()
                        log = Path(logs, str(number))
                        if number < WRITERS:
                            write_again_and_again(seed + number, deadline, log)
                        else:
                            read_again_and_again(contents, seed + number, deadline, log)
                    finally:
                        os._exit(0)
                children.append(child)
            for child in children:
                os.waitpid(child, 0)
            for number in range(WRITERS + READERS):
                log = Path(logs, str(number))
                if not log.exists():
                    problems.append(f"process {number} hangs or was ended")
                    continue
                outcomes, found = json.loads(log.read_text())
                if break_program is None:
                    part.cases.update(outcomes)
                problems += found
            problems += _check_end(root)
        finally:
            os.chdir(before)
    return problems


def _check_end(root: Path) -> list[str]:
    """Return what is wrong after a race: the last command must take the set as it is."""
    problems = []
    code, err = run_quietly("in --strip")
    if code != 0:
        problems.append(f"afterwards: exit code {code}: {err}")
    for name, content in SET_FILES.items():
        if (root / name).read_bytes() != content:
            problems.append(f"afterwards: {name} is not as it was")
    extra = [str(path) for path in root.rglob(".onnxkvrename-*")]
    return problems + [f"left: {extra}"] * bool(extra)


def run(part: Part) -> None:
    """Race again and again until the time is up."""
    if not hasattr(os, "fork"):
        part.skipped = "needs fork"
        return
    part.controls["a writer in place"] = bool(race(part, part.seed, 5, write_in_place))
    seed = part.seed
    while not part.is_over:
        seed += WRITERS + READERS
        for problem in race(part, seed, min(SECONDS, part.deadline - time.monotonic())):
            part.fail(problem)
