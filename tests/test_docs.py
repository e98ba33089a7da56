"""The README and docs/: output is the program's own, commands are valid, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from conftest import FIXTURES
from finding_examples import EXAMPLES, run_example
from findings_page import PAGE as FINDINGS_PAGE
from findings_page import render_finding, render_page, render_passage
from help_pages import on_page_markdown

from onnxkvrename.cli.main import COMMANDS, DEFAULT_COMMAND, load_command
from onnxkvrename.findings import CODES

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
TEXTS = {path: path.read_text("utf-8") for path in PAGES}


class Shown(NamedTuple):
    """A block of commands with their output, and the exit code of the last one."""

    page: Path
    text: str
    code: int

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text.splitlines()[0]}"


SHOWN = [
    Shown(page, match[2], int(match[1] or 0))
    for page, text in TEXTS.items()
    for match in re.finditer(r"<!-- shown ?(\d*) -->\n```console\n(.*?)```", text, re.DOTALL)
]


def list_commands(text: str) -> list[str]:
    """Return the calls of the program in the blocks of a page, without their comments."""
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL)
    lines = (line.removeprefix("$ ") for block in blocks for line in block.splitlines())
    calls = (line for line in lines if line.startswith("onnxkvrename ") and "|" not in line)
    return [re.split(r" +#| > ", call)[0] for call in calls]


CALLS = sorted({call for text in TEXTS.values() for call in list_commands(text)})
CALLS_ON_FIXTURES = sorted(
    call
    for page, text in TEXTS.items()
    for call in list_commands(text)
    if " fixtures/" in call and "$" not in call
    if not any(f"$ {call}\n" in shown.text for shown in SHOWN)  # which are run as well
)


def test_the_pages_show_something() -> None:
    assert len(SHOWN) >= 7
    assert len(CALLS) >= 30


@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_shown_output_is_what_the_commands_print(
    shown: Shown, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FIXTURES, tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    text, code = "", 0
    for command in re.findall(r"^\$ onnxkvrename (.*)$", shown.text, re.MULTILINE):
        outcome = run(*shlex.split(command))
        text, code = f"{text}$ onnxkvrename {command}\n{outcome.out}{outcome.err}", outcome.code
    assert (text, code) == (shown.text, shown.code)


@pytest.mark.parametrize("call", CALLS)
def test_shown_commands_are_valid(call: str) -> None:
    """Their options exist and have valid values; the files are the reader's."""
    _, *words = shlex.split(re.sub(r"\$\w+", "1", call))  # $jobs
    name = words.pop(0) if words[0] in COMMANDS else DEFAULT_COMMAND
    load_command(name).command.make_context(name, words)


@pytest.mark.parametrize("call", CALLS_ON_FIXTURES)
def test_commands_on_fixtures_can_be_run(
    call: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FIXTURES, tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(call)[1:]).code in (0, 1)


def test_an_unknown_option_would_be_found() -> None:
    with pytest.raises(click.NoSuchOption):
        test_shown_commands_are_valid("onnxkvrename verify model.onnx --prefixes VLLM")


def read_anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", TEXTS.get(path) or path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in read_anchors(target), link


def test_the_readme_is_short_and_begins_with_rename() -> None:
    lines = TEXTS[README].splitlines()
    assert len(lines) <= 180
    assert lines[2].startswith("Rename ")


def test_the_readme_shows_what_a_terminal_shows(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"<!-- terminal -->\n```console\n\$ (.*?)\n(.*?)```", TEXTS[README], re.S)
    assert block is not None
    (tmp_path / "model.onnx").write_bytes((FIXTURES / "plain" / "decoder.onnx").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onnxkvrename.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    outcome = run(*shlex.split(block[1])[1:])
    assert re.sub("\x1b\\[[0-9;]*m", "", outcome.out + outcome.err) == block[2]


def test_the_readme_links_to_every_command() -> None:
    table = TEXTS[README].partition("## Commands")[2].partition("\n## ")[0]
    assert [name for name in list(COMMANDS)[1:] if f"`{name}`" not in table] == []


def test_the_site_has_the_help_of_every_command() -> None:
    page = on_page_markdown(TEXTS[ROOT / "docs" / "commands.md"], None)
    for name in COMMANDS:
        help_page = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        options = (each.opts[0] for each in load_command(name).command.params)
        assert [each for each in options if each[0] == "-" and each not in help_page] == []


HOW_TO_UPDATE = "python tests/findings_page.py writes it"


def test_the_page_of_findings_is_made_from_the_table() -> None:
    page = re.sub(r"(?<=```text\n).*?(?=```)", "", TEXTS[FINDINGS_PAGE], flags=re.DOTALL)
    assert page == render_page(dict.fromkeys(CODES, "")), HOW_TO_UPDATE


def test_every_finding_has_a_row_on_the_site_and_an_example() -> None:
    page = on_page_markdown(TEXTS[FINDINGS_PAGE], None)
    rows = re.findall(r"^\| \[(KV\d+)\]\(\S+\) \| (\S+) \|", page, re.MULTILINE)
    assert rows == [(row.code, row.name) for row in CODES.values()]
    assert list(EXAMPLES) == list(CODES)


@pytest.mark.parametrize("code", CODES)
def test_the_example_of_a_finding_produces_it_and_the_fix_removes_it(code: str) -> None:
    (printed, _), (fixed, exit_code) = run_example(code)
    assert re.search(rf": (?:{CODES[code].severity}|error) {code}: ", printed)
    passage = render_passage(code, render_finding(code, printed))
    assert passage in TEXTS[FINDINGS_PAGE], HOW_TO_UPDATE
    assert (exit_code, code in fixed) == (0, False)
