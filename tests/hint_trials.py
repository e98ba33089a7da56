"""Run each command that a hint suggests, where the hint was printed, and judge what it does.

Whatever command line a test runs, the commands in its hints are run after it, each kind once a
session: on a copy of the test's directory that stands at the same path, so that the test finds
its own files untouched. What was found must be gone then, or something later be found instead.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

MAX_BYTES = 20 << 20
"""What a directory may hold to be copied for a trial."""
COMMAND = re.compile(r"`(onnxkvrename(?: (?:[^`'\"]|'[^']*'|\"[^\"]*\")*)?)`")
LINE = re.compile(r"^(?P<where>.*?): (?:error|warning) (?P<code>KV\d{3}): (?P<text>.*)$")
ANNOTATION = re.compile(r"^::(?:error|warning) (?:.*,)?title=(?P<code>\w+)::(?P<text>.*)$")
ERROR = re.compile(r"^error: (?P<text>.*)$")
READERS = {"verify", "inspect", "check-consumer", "compare", "pairs", "explain", "profiles"}
"""Commands that only tell more; what they are suggested for need not be gone after them."""

UNTRIED = {
    "--dask": "a cluster of the test's own, which is gone",
    "MODEL": "more models than a line can name, which the reader has to put in",
    "~/": "the home directory is nobody's to write to",
}
"""What a suggested command is not tried with, and why."""


class Hint(NamedTuple):
    """A suggested command.

    Attributes:
        code: The code of the finding; empty for an error.
        text: What is wrong, without the place and the hint.
        command: The command.
    """

    code: str
    text: str
    command: str


_tried: set[tuple[str, str]] = set()


def find_hints(out: str, err: str) -> Iterator[Hint]:
    """Yield the commands that an output suggests."""
    for line in err.splitlines():
        match = LINE.match(line) or ERROR.match(line)
        if match is not None:
            message, _, hint = match["text"].partition(" (onnxkvrename ")
            if hint:
                hint = f"onnxkvrename {hint}"
            else:
                message, _, hint = match["text"].rpartition(" (")
            code = match.groupdict().get("code") or ""
            yield from (Hint(code, message, found) for found in find_commands(hint[:-1]))
    for line in out.splitlines():
        if match := ANNOTATION.match(line):
            message, _, hint = match["text"].replace("%25", "%").rpartition(" (")
            code = match["code"] if match["code"].startswith("KV") else ""
            yield from (Hint(code, message, found) for found in find_commands(hint[:-1]))
    if out.startswith("{"):
        try:
            yield from _find_in_json(json.loads(out))
        except ValueError:
            return


def find_commands(hint: str) -> list[str]:
    """Return the commands in a hint: it is nothing else, or they are between backticks."""
    return [hint] if hint.startswith("onnxkvrename ") else COMMAND.findall(hint)


def split_words(command: str) -> list[str]:
    r"""Return the words of a command, as bash reads them: also ``$'\012'``."""

    def decode(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        data = re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), os.fsencode(match[1]))
        return shlex.quote(os.fsdecode(data))

    return shlex.split(re.sub(r"\$'([^']*)'|'[^']*'|\"[^\"]*\"", decode, command))


def _find_in_json(value: Any) -> Iterator[Hint]:
    if isinstance(value, list):
        for item in value:
            yield from _find_in_json(item)
    elif isinstance(value, dict):
        if isinstance(hint := value.get("hint"), str):
            text = f"{value.get('name', '')} {value['message']}".lstrip()
            for command in find_commands(hint):
                yield Hint(value.get("code", ""), text, command)
        for item in value.values():
            yield from _find_in_json(item)


def try_hints(
    outcome: tuple[int, str, str],
    directory: Path,
    run: Callable[[Sequence[str]], tuple[int, str, str]],
    cwd: Path | None = None,
) -> None:
    """Run the commands that an output suggests, if their kind was not tried yet.

    Args:
        outcome: Exit code, stdout and stderr of the command.
        directory: The test's own directory.
        run: Runs a command line in this process.
        cwd: Where the command ran, if not here.
    """
    place = Path.cwd() if cwd is None else cwd
    for hint in find_hints(*outcome[1:]):
        kind = (hint.code or _abstract(hint.text), _abstract(hint.command))
        if kind in _tried or any(word in hint.command for word in UNTRIED):
            continue
        words = split_words(hint.command)[1:]
        with suppress(OSError):  # a pipe, a disk that the test lets fail
            if not all(map(_is_small, (directory, *(place / word for word in words)))):
                continue
            _tried.add(kind)
            with _stand_in(directory, place) as scratch:
                words = [_copy_foreign(word, directory, place, scratch) for word in words]
                _judge(hint, words, run(words))


def _abstract(text: str) -> str:
    """Return a text without what differs from one model to the next."""
    return re.sub(r"'[^']*'|\S*[/.]\S*|[0-9]+", "*", text)


def _is_small(path: Path) -> bool:
    """Return whether a directory, or that of a file, can be copied quickly."""
    if not path.exists():
        return True
    size = count = 0
    for folder, _, names in os.walk(path if path.is_dir() else path.parent):
        for name in names:
            count += 1
            size += os.lstat(os.path.join(folder, name)).st_size
            if size > MAX_BYTES or count > 2000:
                return False
    return True


@contextmanager
def _stand_in(directory: Path, place: Path) -> Iterator[Path]:
    """Put a copy in the place of a directory for a while; yield another one for more copies."""
    here = Path.cwd()
    original = directory.with_name(f"{directory.name}.original")
    scratch = directory.with_name(f"{directory.name}.scratch")
    os.rename(directory, original)
    try:
        shutil.copytree(original, directory, symlinks=True)
        scratch.mkdir()
        _cut_links_to_elsewhere(directory)
        os.chdir(place if place.is_relative_to(directory) else scratch)
        yield scratch
    finally:
        os.chdir("/")
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(original, directory)
        os.chdir(here)


def _cut_links_to_elsewhere(directory: Path) -> None:
    """Put copies in the place of links that lead out of a directory: nothing there may change."""
    own = Path(os.path.realpath(directory))
    for folder, folders, files in os.walk(directory):
        for path in (Path(folder, name) for name in (*folders, *files)):
            target = Path(os.path.realpath(path))
            if not path.is_symlink() or target.is_relative_to(own):
                continue
            path.unlink()
            if target.is_dir() and _is_small(target):
                shutil.copytree(target, path, symlinks=False, ignore_dangling_symlinks=True)
                _make_writable(path)
            elif target.is_file() and target.stat().st_size <= MAX_BYTES:
                shutil.copyfile(target, path)


def _make_writable(folder: Path) -> None:
    for each in (folder, *folder.rglob("*")):
        if not each.is_symlink():
            each.chmod(0o755 if each.is_dir() else 0o644)


def _copy_foreign(word: str, directory: Path, place: Path, scratch: Path) -> str:
    """Return a word; for a path outside of the test's directory that of a copy, with its folder."""
    path = Path(os.path.realpath(place / word))
    own = Path(os.path.realpath(directory))
    if own.is_relative_to(path) and own != path:
        raise OSError(f"{word} holds more than the files of this test")
    if not path.exists() or path.is_relative_to(own):
        return word
    folder = path if path.is_dir() else path.parent
    copy = scratch / folder.name
    if not copy.exists():
        shutil.copytree(folder, copy, symlinks=False, ignore_dangling_symlinks=True)
        _make_writable(copy)
    return str(copy if path.is_dir() else copy / path.name)


def _judge(hint: Hint, words: Sequence[str], outcome: tuple[int, str, str]) -> None:
    """Fail for a command that cannot be run, or that finds what it was suggested for."""
    code, out, err = outcome
    shown = f"{hint}\nexit code {code}\n{out[-1000:]}\n{err[-2000:]}"
    is_misused = "`onnxkvrename" in err and "lists all options" in err
    assert not is_misused, f"a suggested command cannot be run: {shown}"
    if not READERS.isdisjoint(words[:1]):
        assert code in (0, 1), f"a suggested command cannot be run: {shown}"
        return
    matches = [LINE.match(line) or ERROR.match(line) for line in err.splitlines()]
    left = [(match.groupdict().get("code") or "", match["text"]) for match in matches if match]
    again = [text for found, text in left if found == hint.code and text.startswith(hint.text)]
    assert not again, f"a suggested command leads back to itself: {shown}"
    assert code != 2 or any(not found for found, _ in left), shown
