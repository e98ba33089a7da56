"""Race renames against someone who swaps external data for links to a file outside.

Another process exchanges the data file, or the directory it is in, with a symbolic link to a
secret outside of the model's directory, as fast as it can, while the model is renamed into
another directory again and again. No result may have a byte of the secret.

A control runs first: data files are opened as they were once, by resolving their path, judging
it, and resolving it again. The race must catch that.

    python tests/soak/race_external_data.py --rounds 10000

About ten minutes for 10,000 rounds on two cores. Exit code 1 if a secret came through, or if
the control was not caught.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import onnx

from onnxkvrename import KvRenameError, Rules, load_rules, rename
from onnxkvrename.files.inside import Folder
from onnxkvrename.files.read import OpenFile, OutsideError, open_file
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming import write

LOCATION = "sub/weights.bin"
SECRET = b"secret!!"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CONTROL_ROUNDS = 3000


def build_case(root: Path) -> Path:
    """Build a model with external data, and a secret outside that could stand for the data."""
    here = root / "here"
    for path in (here / "sub", root / "outside"):
        path.mkdir(parents=True)
    size = 1 << 16
    key, state = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 1, size // 4])
        for name in ("past_key.0", "past_key.0_RetainedState")
    )
    weights = onnx.numpy_helper.from_array(np.ones(size // 4, np.float32), "weights")
    node = onnx.helper.make_node("Add", [key.name, weights.name], [state.name])
    graph = onnx.helper.make_graph([node], "graph", [key], [state], [weights])
    model = onnx.helper.make_model(graph)
    (tensor,) = model.graph.initializer
    onnx.external_data_helper.set_external_data(tensor, LOCATION)
    (here / LOCATION).write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    (here / "model.onnx").write_bytes(model.SerializeToString())
    (root / "outside" / "weights.bin").write_bytes(SECRET * (size // len(SECRET)))
    (here / "link_to_directory").symlink_to(root / "outside")
    (here / "link_to_file").symlink_to(root / "outside" / "weights.bin")
    return here / "model.onnx"


def load_exchange() -> Callable[[Path, Path], None]:
    """Return what exchanges two paths, in one step where the system can do that."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)

    def exchange(first: Path, second: Path) -> None:
        paths = os.fsencode(first), os.fsencode(second)
        if renameat2 and not renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
            return
        aside = first.with_name("aside")
        os.rename(first, aside)
        os.rename(second, first)
        os.rename(aside, second)

    return exchange


def swap_for_ever(here: Path, seed: int) -> None:
    """Exchange the data, or the directory around them, with a link, and back."""
    exchange, chance = load_exchange(), random.Random(seed)
    pairs = [
        (here / "sub", here / "link_to_directory"),
        (here / LOCATION, here / "link_to_file"),
    ]
    while True:
        target, link = chance.choice(pairs)
        exchange(target, link)
        time.sleep(chance.choice((0, 0, 1e-5, 1e-4)))
        exchange(target, link)
        time.sleep(chance.choice((0, 1e-5, 1e-4, 1e-3, 1e-2)))


@contextmanager
def open_as_before() -> Iterator[None]:
    """Resolve and judge a path, then resolve it again and open it: the control."""

    @contextmanager
    def resolve_twice(self: Folder, location: str) -> Iterator[OpenFile]:
        path = self.path / location
        if os.path.commonpath([os.path.realpath(path), self.path]) != str(self.path):
            raise OutsideError("leads out", path=str(path))
        with open_file(Path(os.path.realpath(path))) as file:
            yield file

    def open_by_path(data_file: DataFile) -> AbstractContextManager[OpenFile]:
        return open_file(data_file.path)

    before = Folder.open_file, write.open_data_file
    Folder.open_file = resolve_twice  # type: ignore[method-assign]
    write.open_data_file = open_by_path  # type: ignore[assignment]
    try:
        yield
    finally:
        Folder.open_file, write.open_data_file = before  # type: ignore[method-assign]


def run_round(model: Path, output: Path, rules: Rules) -> str:
    """Rename a model into a new directory, and return what became of it."""
    try:
        report = rename(model, "VLLM", output=output / "m.onnx", rules=rules)
    except KvRenameError:
        return "refused"
    if report.status != "renamed":
        return "found"
    foreign = SECRET in (output / LOCATION).read_bytes()
    return "FOREIGN" if foreign else "renamed"


def race(model: Path, root: Path, rounds: int, *, stop_early: bool, seed: int) -> Counter[str]:
    """Rename a model so many times, or until foreign bytes came through, during swaps."""
    outcomes: Counter[str] = Counter()
    rules = load_rules()
    swapper = multiprocessing.get_context("fork").Process(
        target=swap_for_ever, args=(model.parent, seed), daemon=True
    )
    swapper.start()
    try:
        for number in range(rounds):
            output = root / f"out{number}"
            outcomes[run_round(model, output, rules)] += 1
            shutil.rmtree(output, ignore_errors=True)
            if stop_early and outcomes["FOREIGN"]:
                break
    finally:
        swapper.kill()
        swapper.join()
    return outcomes


def main() -> int:
    """Run the control, then the race, and print what became of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = False
    for name, rounds, opening in (
        ("control", _CONTROL_ROUNDS, open_as_before()),
        ("onnxkvrename", arguments.rounds, contextlib.nullcontext()),
    ):
        with tempfile.TemporaryDirectory() as directory, opening:
            root, start = Path(directory).resolve(), time.monotonic()
            is_control = name == "control"
            outcomes = race(
                build_case(root), root, rounds, stop_early=is_control, seed=arguments.seed
            )
        count = sum(outcomes.values())
        print(f"{name}: {count} rounds in {time.monotonic() - start:.0f} s: {dict(outcomes)}")
        failed |= (outcomes["FOREIGN"] > 0) != is_control
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
