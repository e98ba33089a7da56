"""Text for people: findings and errors as lines, and each command's own text."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, Severity
from onnxkvrename.report.formats import Answer, FileResult, Format, Line, Span, build_line
from onnxkvrename.report.inert import MAX_LINE_LENGTH, escape_text, shorten_parts
from onnxkvrename.text import format_count

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
"""Styles of a :class:`Span`."""
MAX_LISTED_MODELS = 4
"""Models that each have a line; of more, those with the same outcome share one."""
_MAX_SHOWN_FINDINGS = 3
_MAX_BOTH_NAMES = 60
"""Characters of the names of two files that are both shown."""
_MAX_SHOWN_NAMES = 3
"""Names that are listed after that of the first of findings that are alike."""
_MAX_SHOWN_FILES = 10
"""Files that have lines of their own for one code."""
_MAX_VERBOSE_LINE = 4000
"""Characters of the line of a finding with ``-v``."""
_SEVERITY_STYLES: dict[Severity, str] = {"error": RED, "warning": YELLOW}
_WORD = r"[^\s,;()\[\]]+"
LAYERS_PATTERN = r"\blayers? [0-9]+(?:-[0-9]+)?(?:, [0-9]+(?:-[0-9]+)?)*(?: and [0-9,]+ more)?"
"""Layers as a message names them."""
_CLAUSE_END = re.compile(r"[:;,] | \(")
_COUNT_PATTERN = (
    r"\b[0-9,]+(?: of [0-9,]+)?(?= names (?:lacks?|have|has)\b)"
    r"|\b[0-9,]+(?= \w+ \(first: |(?: of \w+)? more\b)"
)
"""A count as a message has it: ``8 names (first: past_key.0)``, ``like 3 more``, ``2 of 48 names
lack``."""


def _render(answer: Answer, width: int | None) -> Iterator[Line]:
    """Yield findings and errors of files for stderr, then the command's own text.

    An error of the whole job goes to stderr in any format.
    """
    if not answer.tells_findings:
        yield from render_finding_lines(answer.files, verbose=answer.is_verbose)
    yield from answer.render_text(width)


FORMAT = Format(_render)


class FoldedFinding(NamedTuple):
    """A finding, or one for several that are alike, in one file or in many.

    Attributes:
        paths: The files.
        finding: The first; where the others differ, it says so.
        total: The number of findings; a file can have several.
        is_same: Whether it is the very same finding each time.
    """

    paths: tuple[str, ...]
    finding: Finding
    total: int = 1
    is_same: bool = True

    def format_where(self) -> str:
        """Return the file, or the numbers of findings and files with the first file."""
        if len(self.paths) == 1:
            return self.paths[0]
        files = format_files(self.paths)
        more = f"{format_count(self.total, 'finding')} in "
        return f"{more}{files}" if self.total > len(self.paths) else files

    def add_hint(self, text: str) -> FoldedFinding:
        """Return it with more to say on how to fix it."""
        hint = f"{self.finding.hint}; {text}" if self.finding.hint else text
        return self._replace(finding=self.finding._replace(hint=hint))


def fold_findings(
    items: Sequence[tuple[str, Finding]], paths: Iterable[str]
) -> Iterator[FoldedFinding]:
    """Yield findings in their order; of several that are alike, the first comes for all of them.

    Findings are alike if code, severity, message and hint are the same except for paths, names,
    counts and layers.

    Args:
        items: Findings, each after the path of its file.
        paths: All files that a message may refer to.
    """
    find_frame = _FrameFinder(paths)
    keys = [
        (finding.code, finding.severity, *map(find_frame, _clear_own_name(path, finding)[2:]))
        for path, finding in items
    ]
    groups: defaultdict[tuple[str, ...], list[tuple[str, Finding]]] = defaultdict(list)
    for key, item in zip(keys, items, strict=True):
        groups[key].append(item)
    folded = {}
    for key, group in groups.items():
        sharing = tuple(dict.fromkeys(path for path, _ in group))
        findings = list(dict.fromkeys(_clear_own_name(path, finding) for path, finding in group))
        if len(group) > 1:
            own_name = group[0][1].name if not findings[0].name else ""
            example = _build_example(findings, own_name, is_one_file=len(sharing) == 1)
            folded[key] = FoldedFinding(sharing, example, len(group), len(findings) == 1)
    shared = frozenset(folded)
    for key, (path, finding) in zip(keys, items, strict=True):
        if key not in shared:
            yield FoldedFinding((path,), finding)
        elif key in folded:
            yield folded.pop(key)


def _clear_own_name(path: str, finding: Finding) -> Finding:
    """Return a finding about the file itself without the file's name."""
    is_own = finding.name in (path, os.path.basename(path))
    return finding._replace(name="") if is_own else finding


def _build_example(findings: Sequence[Finding], own_name: str, *, is_one_file: bool) -> Finding:
    """Return the first of some findings, with names of others that differ in more than numbers.

    If each is about its own file, `own_name` is the first of these files.
    """
    first, *others = findings
    if all((finding.name, finding.message) == (first.name, first.message) for finding in others):
        return first._replace(message=f"each {first.message}") if own_name else first
    stems = {_cut_numbers(finding.subject): finding.subject for finding in reversed(findings)}
    stems.pop(_cut_numbers(first.subject))
    shown = list(stems.values())[::-1][:_MAX_SHOWN_NAMES] if first.subject else []
    more = (
        [f"{len(others) - len(shown):,} more"] if is_one_file and len(others) > len(shown) else []
    )
    names = ", ".join(subject.removesuffix(":") for subject in shown)  # a path before its error
    also = " and ".join(part for part in (names, *more) if part)
    message = f"{first.message}; likewise {also}" if also else first.message
    if is_one_file:
        return first._replace(message=message)
    subject = first.subject or own_name
    return first._replace(
        name="",
        message=f"for example, {subject} {message}" if subject else f"for example, {message}",
    )


def _cut_numbers(name: str) -> str:
    return re.sub("[0-9]+", "", name)


class _FrameFinder:
    """Finds what is left of a text without what differs from one file to the next."""

    def __init__(self, paths: Iterable[str]) -> None:
        places = {place for path in paths for place in (path, os.path.dirname(path)) if place}
        longest_first = sorted(places, key=len, reverse=True)
        path_pattern = "|".join(map(re.escape, longest_first))
        self.path_pattern = re.compile(rf"(?<![^\s'`])(?:{path_pattern})(?![\w-])")
        self.frames: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if text not in self.frames:
            frame = self.path_pattern.sub("\0", text)
            frame = re.sub(_COUNT_PATTERN, "0", frame)
            frame = re.sub(LAYERS_PATTERN, "layer", frame)
            self.frames[text] = re.sub(_WORD, self._find_name_frame, frame)
        return self.frames[text]

    @staticmethod
    def _find_name_frame(match: re.Match[str]) -> str:
        """Return the same for each name; numbers, dtypes and words stay as they are."""
        word = match[0]
        is_name = any(mark in word for mark in "._/\\") and any(map(str.isalpha, word))
        is_number = word[0].isdigit()
        return word if is_number or word.lower().startswith("float") or not is_name else "name"


def format_files(paths: Sequence[str]) -> str:
    """Return the number of some files, the directory that they share, and the first, or both.

    Args:
        paths: Two paths or more.
    """
    try:
        directory = os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:  # absolute and relative paths, or several drives
        directory = ""
    if directory in ("", os.sep):
        where, names = "", paths
    else:
        where, names = f" in {directory}", [os.path.relpath(path, directory) for path in paths]
    both = ", ".join(names[:2])
    listed = both if len(names) == 2 and len(both) <= _MAX_BOTH_NAMES else f"first: {names[0]}"
    return f"{len(paths):,} files{where} ({listed})"


def render_finding_lines(files: Iterable[FileResult], *, verbose: bool) -> Iterator[Line]:
    """Yield lines for stderr with each finding, its fix below it, and the error of each file.

    Args:
        files: The files with their findings.
        verbose: Whether to show every finding, and to leave out nothing of it but the middle of
            a text of thousands of characters.
    """
    limit = _MAX_VERBOSE_LINE if verbose else MAX_LINE_LENGTH
    for item in choose_findings(files, verbose=verbose):
        yield from _render_finding(item, limit)


def choose_findings(
    files: Iterable[FileResult], *, verbose: bool = False, rest: str = "-v shows"
) -> Iterator[FoldedFinding]:
    """Yield the findings and errors of files that are shown.

    What is wrong with one layer is mostly wrong with all of them, so findings of one code
    stay together, and only the first few are shown. What several files share comes once.

    Args:
        files: The files with their findings.
        verbose: Whether to show every finding of every file.
        rest: What shows those that are left out.
    """
    files = list(files)
    items = [(file.label or file.path, each) for file in files for each in _list_findings(file)]
    if verbose:
        yield from (FoldedFinding((path,), finding) for path, finding in items)
        return
    items.sort(key=lambda item: _rank_severity(item[1]))
    paths = (path for file in files for path in (file.label or file.path, file.output) if path)
    folded = list(fold_findings(items, paths))
    own = [(item.finding.code, item.paths[0]) for item in folded if len(item.paths) == 1]
    counts, seen = Counter(own), Counter[tuple[str, str]]()
    ranks: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for code, path in own:
        ranks[code].setdefault(path, len(ranks[code]))
    for item in folded:
        if not item.is_same:
            item = item.add_hint(f"{rest} each")
        if len(item.paths) > 1:
            yield item
            continue
        path, code = item.paths[0], item.finding.code
        seen[code, path] += 1
        if ranks[code][path] >= _MAX_SHOWN_FILES:
            if ranks[code][path] == _MAX_SHOWN_FILES and seen[code, path] == 1:
                hidden = tuple(ranks[code])[_MAX_SHOWN_FILES:]
                yield _count_more(hidden, item.finding, "more like this", rest)
        elif seen[code, path] <= _MAX_SHOWN_FINDINGS:
            yield item
        elif seen[code, path] == _MAX_SHOWN_FINDINGS + 1:
            more = f"and {counts[code, path] - _MAX_SHOWN_FINDINGS:,} more like this"
            yield _count_more((path,), item.finding, more, rest)


def _list_findings(file: FileResult) -> Iterator[Finding]:
    """Yield the findings of a file, errors first, code by code, then its error without a code."""
    order = list(dict.fromkeys(finding.code for finding in file.findings))
    yield from sorted(
        file.findings, key=lambda finding: (_rank_severity(finding), order.index(finding.code))
    )
    if file.error is not None:
        error = file.error
        other_path = "" if error.path in (None, file.path) else f"{error.path}:"
        yield Finding("", "error", other_path, error.message, error.hint or "")


def _rank_severity(finding: Finding) -> int:
    return finding.severity != "error"


def _count_more(paths: tuple[str, ...], finding: Finding, text: str, rest: str) -> FoldedFinding:
    """Return how many findings like this one are left out, as one of them."""
    return FoldedFinding(paths, finding._replace(name="", message=text, hint=f"{rest} all"))


def _render_finding(item: FoldedFinding, limit: int = MAX_LINE_LENGTH) -> Iterator[Line]:
    """Yield a finding, and its fix on a line of its own; an error is one line."""
    finding, count = item.finding, len(item.paths)
    where, hint = item.format_where(), finding.hint
    if not finding.code and count == 1:
        path = finding.name.removesuffix(":") or where
        yield build_error_line(KvRenameError(finding.message, path=path, hint=hint or None), limit)
        return
    where, *shown = shorten_parts((where, finding.subject, finding.message, hint), limit)
    if not finding.code:
        message = f": {where}: {_join_parts(*shown)}"
        yield build_line(Span("error", f"{RED};{BOLD}"), message, err=True)
        return
    name, message, hint = shown
    severity = Span(f"{finding.severity} {finding.code}", _SEVERITY_STYLES[finding.severity])
    sentence = _join_parts(name, message, "")
    yield build_line(Span(where, BOLD), ": ", severity, f": {sentence}", err=True)
    if hint:
        yield build_line("  ", Span("->", CYAN), f" {hint}", err=True)


def build_verdict_line(where: str, verdict: str, style: str) -> Line:
    """Return the line with what became of some files, or how they are judged.

    Args:
        where: The file, or several; empty for all of the command.
        verdict: The outcome in words.
        style: That of its first clause. Conditions and reasons stay plain: a sentence in green or
            yellow is hard to read on a light terminal, and seems to promise all of it.
    """
    files = (Span(where, BOLD), ": ") if where else ()
    end = _CLAUSE_END.search(verdict)
    clause = verdict[: end.start()] if end else verdict
    return build_line(*files, Span(clause, style), verdict[len(clause) :])


def build_error_line(error: KvRenameError, limit: int = MAX_LINE_LENGTH) -> Line:
    """Return the line for stderr with the path, the problem and the fix."""
    return build_line(Span("error", f"{RED};{BOLD}"), f": {format_error(error, limit)}", err=True)


def format_error(error: KvRenameError, limit: int = MAX_LINE_LENGTH) -> str:
    """Return the path, the problem and the fix as one text, safe to show.

    Args:
        error: The error.
        limit: Characters from which on the text is shortened.
    """
    parts = (error.path or "", error.message, error.hint or "")
    path, message, hint = _format_parts(parts, limit)
    return str(KvRenameError(message, path=path or None, hint=hint or None))


def format_finding(finding: Finding, limit: int | None = MAX_LINE_LENGTH) -> str:
    """Return a finding as one sentence with its hint, safe to show.

    Args:
        finding: The finding.
        limit: Characters from which on the text is shortened; ``None`` for the whole text.
    """
    return _join_parts(*_format_parts((finding.subject, finding.message, finding.hint), limit))


def _format_parts(parts: Sequence[str], limit: int | None) -> list[str]:
    return [*map(escape_text, parts)] if limit is None else shorten_parts(parts, limit)


def _join_parts(name: str, message: str, hint: str) -> str:
    """Return a sentence with the fix in brackets."""
    sentence = f"{name} {message}" if name else message
    return f"{sentence} ({hint})" if hint else sentence
