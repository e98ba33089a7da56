"""Text for people: findings and errors as lines, and each command's own text."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, Severity, format_count
from onnxkvrename.report.formats import Answer, FileResult, Format, Line, Span, build_line
from onnxkvrename.report.inert import MAX_LINE_LENGTH, escape_text, shorten_parts

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
"""Styles of a :class:`Span`."""
MAX_LISTED_MODELS = 4
"""Models that each have a line; of more, those with the same outcome share one."""
_MAX_SHOWN_FINDINGS = 3
_MAX_SHOWN_FILES = 10
"""Files that have lines of their own for one code."""
_NAMED_FILES = 2
_MAX_VERBOSE_LINE = 4000
"""Characters of the line of a finding with ``-v``."""
_SEVERITY_STYLES: dict[Severity, str] = {"error": RED, "warning": YELLOW}
_WORD = r"[^\s,;()\[\]]+"
LAYERS_PATTERN = r"\blayers? [0-9]+(?:-[0-9]+)?(?:, [0-9]+(?:-[0-9]+)?)*(?: and [0-9,]+ more)?"
"""Layers as a message names them."""


def _render(answer: Answer, width: int | None) -> Iterator[Line]:
    """Yield findings and errors of files for stderr, then the command's own text.

    An error of the whole job goes to stderr in any format.
    """
    if not answer.tells_findings:
        yield from render_finding_lines(answer.files, verbose=answer.is_verbose)
    yield from answer.render_text(width)


FORMAT = Format(_render)


class FoldedFinding(NamedTuple):
    """A finding of one file, or one that several files share.

    Attributes:
        paths: The files.
        finding: That of the first file; where the others differ, it says ``for example``.
        total: The number of findings; a file can have several.
        is_same: Whether it is the very same finding in each file.
    """

    paths: tuple[str, ...]
    finding: Finding
    total: int = 1
    is_same: bool = True

    def format_where(self) -> str:
        """Return the file, or the numbers of findings and files with the first files."""
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
    """Yield findings in their order; one that several files share comes once, for all of them.

    Files share a finding if its code, severity, name, message and hint are the same except for
    paths, numbers in names, and layers. Where their texts differ in these, at least four have to
    share it: each line of a few says something of its own. What one file has is never folded.

    Args:
        items: Findings, each after the path of its file.
        paths: All files that a message may refer to.
    """
    if len({path for path, _ in items}) < 2:
        yield from (FoldedFinding((path,), finding) for path, finding in items)
        return
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
        if len(sharing) > (1 if len(findings) == 1 else _MAX_SHOWN_FINDINGS):
            own_name = group[0][1].name if not findings[0].name else ""
            example = _build_example(findings, own_name)
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


def _build_example(findings: Sequence[Finding], own_name: str) -> Finding:
    """Return the first of some findings; what is not so in all of them is an example.

    If each is about its own file, `own_name` is the first of these files.
    """
    first = findings[0]
    if len({(finding.name, finding.message) for finding in findings}) > 1:
        subject = first.subject or own_name
        message = f"{subject} {first.message}" if subject else first.message
        return first._replace(name="", message=f"for example, {message}")
    if own_name:
        first = first._replace(message=f"each {first.message}")
    if len(findings) > 1:
        return first._replace(hint=f"for example, {first.hint}")
    return first


class _FrameFinder:
    """Finds what is left of a text without what differs from one file to the next."""

    def __init__(self, paths: Iterable[str]) -> None:
        longest_first = sorted(set(paths), key=len, reverse=True)
        self.path_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.frames: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if text not in self.frames:
            frame = self.path_pattern.sub("\0", text)
            frame = re.sub(LAYERS_PATTERN, "layer", frame)
            self.frames[text] = re.sub(_WORD, self._find_name_frame, frame)
        return self.frames[text]

    @staticmethod
    def _find_name_frame(match: re.Match[str]) -> str:
        """Return a name without its numbers; numbers and dtypes stay as they are."""
        word = match[0]
        is_name = any(mark in word for mark in "._/\\") and not word.lower().startswith("float")
        if is_name and any(map(str.isalpha, word)):
            return re.sub("[0-9]+", "0", word)
        return word


def format_files(paths: Sequence[str]) -> str:
    """Return the number of some files, the directory that they share, and the first of them.

    Args:
        paths: Two paths or more.
    """
    try:
        directory = os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:  # absolute and relative paths, or several drives
        directory = ""
    if directory in ("", os.sep):
        where, names = "", list(paths[:_NAMED_FILES])
    else:
        where = f" in {directory}"
        names = [os.path.relpath(path, directory) for path in paths[:_NAMED_FILES]]
    first = "first: " if len(paths) > _NAMED_FILES else ""
    return f"{len(paths):,} files{where} ({first}{', '.join(names)})"


def render_finding_lines(files: Iterable[FileResult], *, verbose: bool) -> Iterator[Line]:
    """Yield lines for stderr with each finding and the error of each file.

    Args:
        files: The files with their findings.
        verbose: Whether to show every finding, and to leave out nothing of it but the middle of
            a text of thousands of characters.
    """
    limit = _MAX_VERBOSE_LINE if verbose else MAX_LINE_LENGTH
    return (_render_finding(item, limit) for item in choose_findings(files, verbose=verbose))


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
    paths = (path for file in files for path in (file.label or file.path, file.output) if path)
    folded = list(fold_findings(items, paths))
    own = [(item.finding.code, item.paths[0]) for item in folded if len(item.paths) == 1]
    counts, seen = Counter(own), Counter[tuple[str, str]]()
    ranks: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for code, path in own:
        ranks[code].setdefault(path, len(ranks[code]))
    for item in folded:
        if len(item.paths) > 1:
            yield item if item.is_same else item.add_hint(f"{rest} each")
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
    """Yield the findings of a file, code by code, then its error as one without a code."""
    order = list(dict.fromkeys(finding.code for finding in file.findings))
    yield from sorted(file.findings, key=lambda finding: order.index(finding.code))
    if file.error is not None:
        error = file.error
        other_path = "" if error.path in (None, file.path) else f"{error.path}:"
        yield Finding("", "error", other_path, error.message, error.hint or "")


def _count_more(paths: tuple[str, ...], finding: Finding, text: str, rest: str) -> FoldedFinding:
    """Return how many findings like this one are left out, as one of them."""
    return FoldedFinding(paths, finding._replace(name="", message=text, hint=f"{rest} all"))


def _render_finding(item: FoldedFinding, limit: int = MAX_LINE_LENGTH) -> Line:
    finding, count = item.finding, len(item.paths)
    where, hint = item.format_where(), finding.hint
    if not finding.code and count == 1:
        path = finding.name.removesuffix(":") or where
        return build_error_line(KvRenameError(finding.message, path=path, hint=hint or None), limit)
    where, *shown = shorten_parts((where, finding.subject, finding.message, hint), limit)
    if not finding.code:
        message = f": {where}: {_join_parts(*shown)}"
        return build_line(Span("error", f"{RED};{BOLD}"), message, err=True)
    severity = Span(f"{finding.severity} {finding.code}", _SEVERITY_STYLES[finding.severity])
    return build_line(Span(where, BOLD), ": ", severity, f": {_join_parts(*shown)}", err=True)


def build_verdict_line(where: str, verdict: str, style: str, more: str = "") -> Line:
    """Return the line with what became of some files, or how they are judged.

    Args:
        where: The file, or several.
        verdict: The outcome in words.
        style: That of the verdict.
        more: What follows it.
    """
    return build_line(Span(where, BOLD), ": ", Span(verdict, style), more)


def build_error_line(error: KvRenameError, limit: int = MAX_LINE_LENGTH) -> Line:
    """Return the line for stderr with the path, the problem and the fix."""
    return build_line(Span("error", f"{RED};{BOLD}"), f": {format_error(error, limit)}", err=True)


def format_error(error: KvRenameError, limit: int | None = MAX_LINE_LENGTH) -> str:
    """Return the path, the problem and the fix as one text, safe to show.

    Args:
        error: The error.
        limit: Characters from which on the text is shortened; ``None`` for the whole text.
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
