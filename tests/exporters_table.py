"""Rename, verify, run and strip the real exports of other exporters, and show it as a table.

``python tests/exporters_table.py`` runs everything and writes the table beside this file.
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
from onnxkvrename.findings import Finding
from onnxkvrename.verification.pairs.infer_rules import infer_rules, trace_model

OTHERS = EXPORTS.with_name("exports-other")
PAGE = Path(__file__).with_suffix(".md")
MARKS = ("<!-- table -->\n", "<!-- /table -->\n")
HEADINGS = ("export", "profile", "names", "verify", "strip", "onnxruntime")
FOLDERS = (
    *(f"optimum/{name}" for name in ("llama", "gemma2", "gpt2", "bloom", "gpt_bigcode")),
    *("optimum/t5", "optimum/whisper"),
    *(f"genai/{name}" for name in ("llama-fp32", "llama-int4", "gemma2-fp32", "lfm2-fp32-t5")),
    *("genai/llama-cuda-paged-int8kv", "genai/whisper-fp32-t5"),
    *("mobius/llama-ort-genai", "mobius/qwen3_5-ort-genai", "mobius/llama-static"),
    *("qnn", "by-hand", "dynamo"),
)


class Row(NamedTuple):
    """What became of one model.

    Attributes:
        export: Its path below the exports.
        profile: The profile that was picked.
        names: How many names changed.
        verify: The verdict on the result.
        strip: Whether the token comes out again without a trace.
        run: Whether the result gives the same values in onnxruntime, or why not.
    """

    export: str
    profile: str
    names: str
    verify: str
    strip: str
    run: str


def check_folder(name: str, work: Path, *, with_run: bool) -> Iterator[Row]:
    """Yield a row for each model of a folder.

    Args:
        name: The folder below the exports.
        work: A directory for results.
        with_run: Whether to run models in onnxruntime.
    """
    source, renamed, back = OTHERS / name, work / "renamed", work / "back"
    report = rename_all([source], "VLLM", directory=renamed)
    refusals = {model.path: list_errors(model) for model in report.models if model.failed}
    if report.has_no_buffers:
        for model in report.models:
            yield check_pairs_of_dataflow(model.path, work, with_run=with_run)
        return
    if refusals:
        report = rename_all([source], "VLLM", directory=renamed, sidecars="off")
    if all(model.status in ("renamed", "unchanged") for model in report.models):
        rename_all([renamed], strip=True, directory=back, sidecars="off" if refusals else "auto")
    for model in report.models:
        yield check_model(model, report, refusals, source, back, with_run=with_run)


def check_pairs_of_dataflow(model: str, work: Path, *, with_run: bool) -> Row:
    """Return the row of a model whose names no profile knows: the graph tells the pairs."""
    path = Path(model)
    rules = infer_rules([trace_model(path)], ["VLLM"]).rules
    renamed, back = work / "renamed" / path.name, work / "back" / path.name
    report = rename(path, "VLLM", output=renamed, rules=rules)
    rename(renamed, strip=True, output=back, rules=rules)
    verified = verify(renamed, rules=rules, run=with_run, reference=path if with_run else None)
    return build_row(path, "`--pairs dataflow`", str(len(report.name_map)), back, verified)


def check_model(
    model: ModelReport,
    report: Report,
    refusals: dict[str, list[Finding]],
    source: Path,
    back: Path,
    *,
    with_run: bool,
) -> Row:
    """Return the row of one model of a report."""
    path = Path(model.path)
    export = path.relative_to(OTHERS).as_posix()
    profile = report.profile.name if report.profile is not None else ""
    if not model.pairs:
        return Row(export, "", "no cache in it", "", "", "")
    names = str(len(model.name_map))
    if path.as_posix() in refusals:
        (first, *_) = refusals[model.path] or [None]
        names += f", with `--sidecars off`{'' if first is None else f' ({first.code})'}"
    verified = verify(model.output, run=with_run, reference=path if with_run else None)
    return build_row(path, profile, names, back / path.relative_to(source), verified)


def build_row(path: Path, profile: str, names: str, stripped: Path, verified: VerifiedModel) -> Row:
    """Return the row of a model that was renamed, verified and stripped again."""
    is_same = stripped.exists() and stripped.read_bytes() == path.read_bytes()
    errors = sorted({finding.code for finding in list_errors(verified.report)})
    return Row(
        path.relative_to(OTHERS).as_posix(),
        profile,
        names,
        "holds" if not errors else " ".join(errors),
        "same bytes" if is_same else "differs",
        describe_run(verified.run is not None, verified.report.findings),
    )


def describe_run(has_run: bool, findings: Sequence[Finding]) -> str:
    """Return what a run of the source and of the result came to."""
    faults = [finding for finding in findings if finding.code in ("KV118", "KV119")]
    if not faults:
        return "equal" if has_run else ""
    if faults[0].code == "KV118":
        return f"differs: {faults[0].message}"
    reason = faults[0].message.partition(": ")[2]
    for known, text in (
        ("PagedAttention", "needs CUDA"),
        ("SIGSEGV", "crashes onnxruntime, before as after"),
        ("RotaryEmbedding", "onnxruntime refuses it, before as after"),
    ):
        if known in reason:
            return text
    return reason


def list_errors(model: ModelReport) -> list[Finding]:
    """Return the findings of severity error."""
    return [finding for finding in model.findings if finding.severity == "error"]


def render_table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_table(page: str, table: str) -> str:
    """Return the page with another table between its marks."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}{table}{MARKS[1]}{rest.split(MARKS[1])[1]}"


def list_rows(*, with_run: bool, folders: Sequence[str] = FOLDERS) -> list[Row]:
    """Return the rows of all models in some folders."""
    rows = list[Row]()
    for name in folders:
        with tempfile.TemporaryDirectory() as work:
            rows += check_folder(name, Path(work), with_run=with_run)
    return rows


if __name__ == "__main__":
    if not OTHERS.is_dir():
        sys.exit(f"no exports at {OTHERS}")
    table = render_table(list_rows(with_run=True))
    PAGE.write_text(replace_table(PAGE.read_text("utf-8"), table), "utf-8")
    print(table, end="")
