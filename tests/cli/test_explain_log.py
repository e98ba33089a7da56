"""``explain --log``: what the messages in a log of vLLM mean."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import FIXTURES, Piped, Run
from terminals import run_on_terminal

from onnxkvrename.vllm.messages import read_log

LOG = FIXTURES / "logs" / "decode.log"
CORE = "\x1b[0;36m(EngineCore_DP0 pid=12)\x1b[0;0m ERROR 11-23 15:00:00 [core.py:1087]"
HASH = "RuntimeError: NIXL compatibility hash mismatch. Local: 3fa0, Remote: 77bc. Prefill and"
BLOCKS = (
    "AssertionError: Local block size 64 is not divisible by remote block size 48 or vice versa."
)
FEWER_BLOCKS = BLOCKS.replace("48", "96")
RANKS = "Local tensor parallel size 4 is not divisible by remote tensor parallel size 3."
MANAGER = "WARNING Hybrid KV cache manager is disabled for this hybrid model, This means"
MEMORY = (
    "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (9.5 GiB). Try increasing"
)
NO_MEMORY = "ValueError: No available memory for the cache blocks. Try increasing"
COUNTS = "AssertionError: buffers must be a list of numpy arrays or a dictionary of numpy arrays"
COUNT = "AssertionError: KV buffer count mismatch: expected 8 buffers, got 7"


def read(run: Run, tmp_path: Path, log: bytes) -> tuple[int, Any]:
    """Return the exit code and the document for a log."""
    path = tmp_path / "vllm.log"
    path.write_bytes(log)
    outcome = run("explain", "--log", path, "--format", "json")
    document = json.loads(outcome.out)
    assert (document["log"], document["exit_code"]) == (str(path), outcome.code)
    return outcome.code, document


@pytest.mark.parametrize(
    ("lines", "code", "messages"),
    [
        ([], 0, []),
        (["INFO Uvicorn running", "", "INFO nixl: block size 16, local and remote"], 0, []),
        ([f"{CORE} {HASH}"], 1, [("KV628", 1, 1)]),
        (["a", f"{CORE} {BLOCKS}", "b", f"(Worker_TP1 pid=9) {BLOCKS}"], 1, [("KV622", 2, 2)]),
        ([BLOCKS, FEWER_BLOCKS, BLOCKS], 1, [("KV622", 1, 3)]),
        ([RANKS, HASH, COUNT, RANKS], 1, [("KV619", 1, 2), ("KV628", 2, 1), ("KV624", 3, 1)]),
        ([MANAGER], 0, [("KV607", 1, 1)]),
        ([MEMORY, NO_MEMORY, COUNTS], 1, [("KV622", 1, 1), ("KV622", 2, 1), ("KV604", 3, 1)]),
        (["NIXL compatibility hash mismatch. Local: 3fa0"], 0, []),
        (["Remote: 77bc. NIXL compatibility hash mismatch. Local: 3fa0"], 0, []),
        ([json.dumps({"log": f"{COUNT}\n", "stream": "stderr"})], 1, [("KV624", 1, 1)]),
    ],
)
def test_each_known_message_is_explained_once(
    lines: list[str], code: int, messages: list[tuple[str, int, int]], run: Run, tmp_path: Path
) -> None:
    exit_code, document = read(run, tmp_path, "".join(f"{line}\n" for line in lines).encode())
    shown = [(each["code"], each["first_line"], each["lines"]) for each in document["messages"]]
    assert (exit_code, document["lines"], shown) == (code, len(lines), messages)


@pytest.mark.parametrize(
    ("line", "values", "cause"),
    [
        (BLOCKS, {"local": "64", "remote": "48"}, "blocks have 64 tokens on this side and 48 on"),
        (COUNT, {"expected": "8", "received": "7"}, "selects 8 KV buffers by name and received 7:"),
        (
            MEMORY,
            {"tokens": "131072", "needed": "16.0", "available": "9.5"},
            "a request of 131072 tokens takes 16.0 GiB on each GPU, and 9.5 GiB are left",
        ),
        (
            json.dumps({"log": f"{COUNT}\n"}),
            {"expected": "8", "received": "7"},
            "selects 8 KV buffers by name and received 7:",
        ),
        (
            f"(Worker_TP0 pid=7) {HASH}".replace("3fa0", "\x1b[31m3fa0\x1b[0m"),
            {"local": "3fa0", "remote": "77bc"},
            "KV heads",
        ),
    ],
)
def test_a_cause_has_the_values_of_the_message(
    line: str, values: dict[str, str], cause: str, run: Run, tmp_path: Path
) -> None:
    _, document = read(run, tmp_path, line.encode())
    (message,) = document["messages"]
    assert message["values"] == values
    assert cause in message["cause"]


def test_the_fix_of_a_finding_is_that_of_its_page(run: Run, tmp_path: Path) -> None:
    line = b"QaicLMCacheConnectorV1 currently does not support models with hybrid KV cache"
    code, document = read(run, tmp_path, line)
    (message,) = document["messages"]
    assert (code, message["code"], message["severity"]) == (1, "KV606", "error")  # it has stopped
    assert f"Fix: {message['fix']}" in run("explain", "KV606").out


@pytest.mark.parametrize(
    ("log", "lines", "count"),
    [
        (b"x" * (1 << 21) + BLOCKS.encode() + b"\n" + HASH.encode(), 2, 1),
        (BLOCKS.encode() + b"x" * (1 << 21) + b"\n" + b"y\n", 2, 1),
        (b"\n" * ((1 << 20) - 20) + BLOCKS.encode() + b"\n", (1 << 20) - 19, 1),
        (b"INFO\n" * (1 << 19) + BLOCKS.encode(), (1 << 19) + 1, 1),
        (bytes(range(256)) * 64 + b"\n\0" + BLOCKS.encode() + b"\xff\0", 66, 1),
        (BLOCKS.encode() + b"\r\n" + HASH.encode() + b"\r\n", 2, 2),
        (b"KV buffer count mismatch: expected " * 200_000, 1, 0),
        (b"Local block size 6 is not divisible by remote block size \n" * 20_000, 20_000, 0),
    ],
    ids=["late", "long", "cut", "many", "binary", "crlf", "repeated", "unfinished"],
)
def test_any_log_can_be_read(log: bytes, lines: int, count: int, run: Run, tmp_path: Path) -> None:
    _, document = read(run, tmp_path, log)
    assert (document["lines"], len(document["messages"])) == (lines, count)


def test_a_line_without_an_end_takes_no_memory() -> None:
    tracemalloc.start()
    reading = read_log(b"x" * (1 << 20) for _ in range(64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (reading.line_count, reading.messages) == (1, ())
    assert peak < 1 << 23


@pytest.mark.parametrize("output_format", ["text", "github", "json"])
def test_no_value_of_a_log_acts_on_a_terminal_or_a_ci_runner(
    output_format: str, run: Run, tmp_path: Path
) -> None:
    value = "\x1b]0;title\x07\u202e\r::error::##[command]\x9b2J"
    path = tmp_path / "vllm.log"
    path.write_bytes(f"::error::{HASH}\n".replace("3fa0", value).encode())
    outcome = run("explain", "--log", path, "--format", output_format)
    printed = outcome.out + outcome.err
    assert outcome.code == 1
    assert not set("\x1b\x07\u202e\r\x9b") & set(printed)
    assert "##[command]" not in printed
    assert sum(line.startswith("::") for line in printed.splitlines()) == (
        2 if output_format == "github" else 0
    )


@pytest.mark.parametrize(
    ("log", "code", "said"),
    [
        (b"INFO\nINFO\n", 0, "nothing known in 2 lines"),
        (b"", 0, "the log is empty"),
        (
            b"\x08\x08\x00\n\xff\n",
            2,
            "is not a text log: it has NUL bytes and no known message (--log takes what vLLM "
            "printed, in UTF-8)",
        ),
    ],
    ids=["unknown", "empty", "binary"],
)
def test_a_log_without_known_messages_says_so(
    log: bytes, code: int, said: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "vllm.log"
    path.write_bytes(log)
    outcome = run("explain", "--log", path)
    assert (outcome.code, outcome.out, f"{path}: {said}" in outcome.err) == (code, "", True)


@pytest.mark.parametrize(
    ("log", "message", "reader"),
    [
        (BLOCKS.encode("utf-16"), "is UTF-16, not plain text", "iconv -f UTF-16 -t UTF-8"),
        (gzip.compress(BLOCKS.encode(), mtime=0), "is compressed by gzip, not plain text", "zcat"),
    ],
)
def test_a_log_in_another_form_is_an_error(
    log: bytes,
    message: str,
    reader: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "vllm.log"
    path.write_bytes(log)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(log)))
    for source in (path, "-"):
        outcome = run("explain", "--log", source)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith(f"error: {source}: {message} (")
        assert re.findall(r"iconv -f UTF-16 -t UTF-8|z\w*cat", outcome.err) == [reader]
        piped = f"`{reader} {source} | onnxkvrename explain --log -`"
        assert (piped in outcome.err) == (source == path)


def test_a_log_without_its_option_is_answered_with_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("KV402").touch()
    assert run("explain", "KV402").code == 0
    for path in (str(LOG), "serve.log.gz"):
        outcome = run("explain", path)
        assert (outcome.code, outcome.out) == (2, "")
        assert f"`onnxkvrename explain --log {path}`" in outcome.err


def test_a_log_comes_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(f"{BLOCKS}\n".encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    outcome = run("explain", "--log", "-")
    assert (outcome.code, outcome.err) == (1, "-: 1 known message in 1 line\n")
    assert outcome.out.startswith("-:1: error KV622: Local block size 64 is not divisible by")


def test_a_pipe_may_end_early_and_stdin_may_be_closed(piped: Piped, tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(f"{BLOCKS}\n")
    process = piped("cat vllm.log | $K explain --log - | head -1", tmp_path)
    assert process.stdout.startswith("-:1: error KV622: ")
    process = piped("$K explain --log - <&-", tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: stdin is closed (")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--log", "missing.log"), "missing.log: no such file (--log - reads stdin)"),
        (("--log", "."), ".: is a directory"),
        (("--log", os.devnull), "is not a regular file (--log - reads stdin)"),
        (("--log", ""), "an empty path"),
        (("KV402", "--log", "vllm.log"), "cannot be used together"),
        (("--format", "json"), "--format requires --log FILE"),
    ],
)
def test_a_log_that_cannot_be_read_is_an_error(
    args: tuple[str, ...], message: str, run: Run
) -> None:
    outcome = run("explain", *args)
    assert outcome.code == 2
    assert message in outcome.err


def test_a_terminal_gets_lines_that_fit() -> None:
    code, shown = run_on_terminal(
        [sys.executable, "-m", "onnxkvrename", "explain", "--log", LOG.name],
        {**os.environ, "COLUMNS": "60", "NO_COLOR": "1"},
        LOG.parent,
    )
    first, *facts = shown.splitlines()
    assert (code, first.partition(" Local")[0]) == (1, "decode.log:7: error KV622:")
    assert all(len(line) <= 60 for line in facts if "`" not in line)
    assert [line.split()[0] for line in facts if line[:3].strip()] == [
        *("finding", "cause", "fix", "before", "decode.log:")
    ]
