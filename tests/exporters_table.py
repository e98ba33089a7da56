"""Rename, verify and strip the real exports of other exporters, and show it as a table.

``python tests/exporters_table.py`` runs everything and writes the table of ``docs/exporters.md``.
The exports are not in the repository: see `real_exports`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from real_exports import EXPORTS

from onnxkvrename import ModelReport, Report, VerifiedModel, rename, rename_all, verify
from onnxkvrename.errors import RulesError
from onnxkvrename.findings import Finding
from onnxkvrename.verification.pairs.infer_rules import infer_rules, trace_model

OTHERS = EXPORTS.with_name("exports-other")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "exporters.md"
MARKS = ("<!-- table -->\n", "<!-- /table -->\n")
HEADINGS = ("export", "options", "profile", "names", "verify", "strip")
TOKEN = "KV"
NO_CACHE = "no cache found"
FOLDERS = (
    *(f"optimum/{name}" for name in ("llama", "gemma2", "gpt2", "bloom", "gpt_bigcode")),
    *("optimum/t5", "optimum/whisper"),
    *(f"genai/{name}" for name in ("llama-fp32", "llama-int4", "gemma2-fp32", "lfm2-fp32-t5")),
    *("genai/llama-cuda-paged-int8kv", "genai/whisper-fp32-t5"),
    *("mobius/llama-ort-genai", "mobius/qwen3_5-ort-genai", "mobius/llama-static"),
    *("qnn", "by-hand", "dynamo"),
    *(f"new/hf5-{name}" for name in ("llama", "llama_static", "lfm2", "t5")),
    *("new/mobius-bart", "new/mobius-mamba2", "new/genai-llama-dml", "new/optimum-marian"),
    *("new/ort-gpt2", "new/ort-phi2", "new/tf2onnx-decoder", "new/tf2onnx-lstmcell"),
    *("new/rwkv4", "new/sherpa-zipformer2", "new/silero-vad", "new/no-cache"),
)


class Row(NamedTuple):
    """What became of one model.

    Attributes:
        export: Its path below the exports.
        options: The options that rename it; empty if nothing does.
        profile: The profile that was picked.
        names: How many names changed.
        verify: The verdict on the result.
        strip: Whether the token comes out again without a trace.
    """

    export: str
    options: str
    profile: str
    names: str
    verify: str
    strip: str


def check_folder(name: str, work: Path) -> Iterator[Row]:
    """Yield a row for each model of a folder.

    Args:
        name: The folder below the exports.
        work: A directory for results.
    """
    source, renamed, back = OTHERS / name, work / "renamed", work / "back"
    report = rename_all([source], TOKEN, directory=renamed)
    refusals = {model.path: list_errors(model) for model in report.models if model.failed}
    if refusals:
        report = rename_all([source], TOKEN, directory=renamed, sidecars="off")
    if all(model.failed or not model.pairs for model in report.models):
        for model in report.models:
            yield check_unknown_names(model.path, work)
        return
    if all(model.status in ("renamed", "unchanged") for model in report.models):
        rename_all([renamed], strip=True, directory=back, sidecars="off" if refusals else "auto")
    for model in report.models:
        yield check_model(model, report, refusals, source, back)


def check_unknown_names(model: str, work: Path) -> Row:
    """Return the row of a model whose names no profile matches: `pairs` writes rules for it."""
    path = Path(model)
    renamed, back = work / "renamed" / path.name, work / "back" / path.name
    try:
        rules = infer_rules(trace_model(path)).rules
    except RulesError:
        assert not renamed.exists()
        return Row(path.relative_to(OTHERS).as_posix(), "", "", NO_CACHE, "", "")
    report = rename(path, TOKEN, output=renamed, rules=rules)
    rename(renamed, strip=True, output=back, rules=rules)
    verified = verify(renamed, rules=rules)
    options = f"`--prefix {TOKEN} --rules rules.toml`"
    return build_row(path, (options, "", str(len(report.name_map))), back, verified)


def check_model(
    model: ModelReport,
    report: Report,
    refusals: dict[str, list[Finding]],
    source: Path,
    back: Path,
) -> Row:
    """Return the row of one model of a report."""
    path = Path(model.path)
    profile = report.profile.name if report.profile is not None else ""
    if not model.pairs:
        return Row(path.relative_to(OTHERS).as_posix(), "", "", NO_CACHE, "", "")
    options, names = f"`--prefix {TOKEN}`", str(len(model.name_map))
    if path.as_posix() in refusals:
        options = f"`--prefix {TOKEN} --sidecars off`"
        names += "".join(f" ({error.code})" for error in refusals[model.path][:1])
    verified = verify(Path(model.output))
    return build_row(path, (options, profile, names), back / path.relative_to(source), verified)


def build_row(
    path: Path, cells: tuple[str, str, str], stripped: Path, verified: VerifiedModel
) -> Row:
    """Return the row of a model that was renamed, verified and stripped again."""
    is_same = stripped.exists() and stripped.read_bytes() == path.read_bytes()
    errors = sorted({finding.code for finding in list_errors(verified.report)})
    return Row(
        path.relative_to(OTHERS).as_posix(),
        *cells,
        "holds" if not errors else " ".join(errors),
        "same bytes" if is_same else "differs",
    )


def list_errors(model: ModelReport) -> list[Finding]:
    """Return the findings of severity error."""
    return [finding for finding in model.findings if finding.severity == "error"]


def render_table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read_table() -> list[Row]:
    """Return the rows of the page's table."""
    text = PAGE.read_text("utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert cells[0] == list(HEADINGS)
    return [Row(*line) for line in cells[2:]]


def replace_table(page: str, table: str) -> str:
    """Return the page with another table between its marks."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}{table}{MARKS[1]}{rest.split(MARKS[1])[1]}"


def list_rows(folders: Sequence[str] = FOLDERS) -> list[Row]:
    """Return the rows of all models in some folders."""
    rows = list[Row]()
    for name in folders:
        with tempfile.TemporaryDirectory() as work:
            rows += check_folder(name, Path(work))
    return rows


if __name__ == "__main__":
    if not OTHERS.is_dir():
        sys.exit(f"no exports at {OTHERS}")
    table = render_table(list_rows())
    PAGE.write_text(replace_table(PAGE.read_text("utf-8"), table), "utf-8")
    print(table, end="")
