"""Results as lines, a diff, JSON or GitHub's workflow commands; strings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from click import style

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, document, error_values, finding_values
from onnxkvrename.rules.plan import End, Pair
from onnxkvrename.rules.results import ModelReport, Report, TextReport
from onnxkvrename.rules.window_diff import runs_text

SCHEMA = "onnxkvrename.report/1"
STAMP = "metadata onnxkvrename.kv_layout_sha256"
"""What a stamp is called in a diff."""
_FEW = 3
_COLORS = {"error": "red", "warning": "yellow"}


def show(text: str) -> str:
    """Text from a file, fit to be shown: what moves, hides or reorders is escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(ord(char)) for char in text)


def _escape(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def lines(report: Report, *, look: bool) -> Iterator[str]:
    """``old -> new`` for each name that changed, to ``look`` for each that would.

    The model stands before it if there are several.
    """
    many = len(report.models) > 1
    for model in report.models:
        changes = model.status == ("would-rename" if look else "renamed")
        for old, new in model.names.items() if changes else ():
            line = f"{show(old)} -> {show(new)}"
            yield f"{show(model.path)}: {line}" if many else line


def diff(report: Report, *, color: bool) -> Iterator[str]:
    """The names that would go, and those that would come, as a diff shows lines."""
    for model in report.models:
        if model.status == "would-rename":
            yield _painted(f"--- {show(model.path)}", color, bold=True)
            yield _painted(f"+++ {show(model.output)}", color, bold=True)
            for old, new in model.names.items():
                yield _painted(f"-{show(old)}", color, fg="red")
                yield _painted(f"+{show(new)}", color, fg="green")
            if model.stamp is not None:
                yield _painted(f"-{STAMP}", color, fg="red")


def states(report: Report, *, look: bool) -> Iterator[str]:
    """A line for each model: what became of it, or to ``look`` what would.

    An error has spoken for itself, and for the models that were left alone because of it.
    """
    for model in report.models:
        if model.error is None and (look or model.status != "would-rename"):
            yield f"{show(model.path)}: {state(model, look=look)}{_elsewhere(model)}"
    yield from text_states(report)


def text_states(report: Report) -> Iterator[str]:
    """A line for each text that changed, or would; none if a model failed."""
    for text in report.texts:
        if text.status in ("renamed", "would-rename") and not any(m.failed for m in report.models):
            yield f"{show(text.path)}: {_text_state(text)}{_elsewhere(text)}"


def _text_state(text: TextReport) -> str:
    verb = "would change" if text.status == "would-rename" else "changed"
    return f"{text.changed} names {verb}"


def _elsewhere(item: ModelReport | TextReport) -> str:
    """Where a result went, or would go, if not back to its source."""
    moved = item.output != item.path and item.status in ("renamed", "would-rename")
    return f" -> {show(item.output)}" if moved else ""


def state(model: ModelReport, *, look: bool) -> str:
    """What became of a model, or to ``look`` would, in a few words."""
    if model.status == "failed":
        return "failed: nothing was written"
    if model.status == "would-rename":
        return _change(model, "would change") if look else "left alone: another model failed"
    if model.status == "renamed":
        return _change(model, "changed")
    if not model.pairs:
        return "unchanged: no KV buffer in it"
    tokens = {end.token for pair in model.pairs for end in pair.ends}
    if model.names:
        return f"unchanged: {show(model.output)} is up to date"
    carried = ", ".join(sorted(show(token) for token in tokens if token))
    return f"unchanged: every buffer carries {carried}" if carried else "unchanged: no token in it"


def _change(model: ModelReport, verb: str) -> str:
    """What changes in a model: names, and the stamp of a layout that they make void."""
    if model.stamp:
        return "stamped"
    said = [f"{len(model.names)} names {verb}"] if model.names else []
    return "; ".join([*said, *(["its stamp goes"] if model.stamp is not None else [])])


def ranges(layers: Sequence[int]) -> str:
    """``layers 0-5, 7``, of numbers in order."""
    text = runs_text(layers)
    return f"layer {text}" if len(layers) == 1 else f"layers {text}"


def findings(model: ModelReport, *, color: bool, verbose: bool) -> Iterator[str]:
    """One line for each finding and for the error of a model.

    What is wrong with one layer is mostly wrong with all of them, so those of one code
    stand together, and only the first few are given, unless verbose.
    """
    seen: Counter[str] = Counter()
    order = list(dict.fromkeys(found.code for found in model.findings))
    for found in sorted(model.findings, key=lambda found: order.index(found.code)):
        seen[found.code] += 1
        where = _painted(show(model.path), color, bold=True)
        code = _painted(f"{found.severity} {found.code}", color, fg=_COLORS[found.severity])
        if verbose or seen[found.code] <= _FEW:
            yield f"{where}: {code}: {_sentence(found)}"
        elif seen[found.code] == _FEW + 1:
            more = sum(other.code == found.code for other in model.findings) - _FEW
            yield f"{where}: {code}: and {more} more like this (-v shows all)"
    if model.error is not None:
        yield error(model.error, color=color)


def error(fault: KvRenameError, *, color: bool) -> str:
    """The one line that says what is wrong, where, and how to mend it."""
    return f"{_painted('error', color, fg='red', bold=True)}: {show(str(fault))}"


def _sentence(found: Finding) -> str:
    about = f"{found.name} {found.message}" if found.name else found.message
    return show(f"{about} ({found.hint})")


def as_json(report: Report, command: str, code: int, fault: KvRenameError | None = None) -> str:
    """One document, held against ``schemas/report-1.json`` by the tests."""
    counts = {"renamed": 0, "unchanged": 0, "would-rename": 0, "failed": 0}
    for model in report.models:
        counts[model.status] += 1
    models = [_model(model) for model in report.models]
    texts = [text._asdict() for text in report.texts]
    return document(SCHEMA, command, code, fault, models=models, texts=texts, summary=counts)


def _model(model: ModelReport) -> dict[str, Any]:
    return {
        "path": model.path,
        "output": model.output,
        "status": model.status,
        "pairs": [pair_values(pair) for pair in model.pairs],
        "kept": [{"name": kept.name, "reason": kept.reason} for kept in model.kept],
        "unstamped": model.stamp == "",
        "findings": [finding_values(found) for found in model.findings],
        "error": error_values(model.error),
    }


def pair_values(pair: Pair) -> dict[str, Any]:
    """A pair for programs."""
    return {
        "layer": pair.layer,
        "buffer": pair.buffer,
        "kind": pair.kind,
        "scope": pair.scope,
        "input": _end(pair.input),
        "output": _end(pair.output),
    }


def _end(end: End | None) -> dict[str, str] | None:
    return None if end is None else {"old": end.old, "new": end.new}


def github(report: Report, *, look: bool, judge: bool, quiet: bool) -> Iterator[str]:
    """Workflow commands that GitHub shows beside the files.

    To ``judge``, a name that would change is an error. No name may end a command,
    begin another, or stop later ones:
    https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
    """
    for model in report.models:
        yield from workflow_commands(model)
        if model.error is not None:
            continue
        if judge and model.status == "would-rename":
            title = {"file": model.path, "title": "names"}
            yield command("error", title, state(model, look=look))
        elif not quiet:
            title = {"file": model.path, "title": model.status}
            yield command("notice", title, state(model, look=look))
    for text in report.texts if judge else ():
        if text.status == "would-rename":
            yield command("error", {"file": text.path, "title": "names"}, _text_state(text))


def workflow_commands(model: ModelReport) -> Iterator[str]:
    """The findings and the error of a model as workflow commands."""
    for found in model.findings:
        title = {"file": model.path, "title": found.code}
        yield command(found.severity, title, _sentence(found))
    if model.error is not None:
        yield command("error", {"file": model.path, "title": "failed"}, show(str(model.error)))


def command(kind: str, properties: Mapping[str, str], message: str) -> str:
    """One workflow command, its parts escaped."""
    given = ",".join(
        f"{key}={_percent(show(value)).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in properties.items()
    )
    return f"::{kind} {given}::{_percent(message)}"


def _percent(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped.replace("##[", "## [")


def _painted(text: str, color: bool, **how: Any) -> str:
    return style(text, **how) if color else text
