from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import models
import pytest
from conftest import Run
from models import saved

import onnxkvrename
from onnxkvrename.findings import CODES
from onnxkvrename.report.formats import Answer, FileResult
from onnxkvrename.report.formats.sarif import FORMAT, format_uri

# No package ships the schema that OASIS publishes, so this states of it what we use,
# without the freedom to add anything:
# https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json


def strict(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **optional},
        "additionalProperties": False,
    }


def listing(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT = strict({"text": {"type": "string", "minLength": 1}})
LEVEL = {"enum": ["none", "note", "warning", "error"]}
URI = {"type": "string", "pattern": r"^(file://)?([A-Za-z0-9/._~-]|%[0-9A-F]{2})+$"}
LOCATION = strict(
    {"physicalLocation": strict({"artifactLocation": strict({"uri": URI})})},
    logicalLocations=listing(strict({"name": {"type": "string", "minLength": 1}})),
)
RULE = strict(
    {
        "id": {"type": "string"},
        "shortDescription": TEXT,
        "help": TEXT,
        "defaultConfiguration": strict({"level": LEVEL}),
    }
)
RESULT = strict(
    {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": LEVEL,
        "message": TEXT,
        "locations": listing(LOCATION),
    }
)
NOTIFICATION = strict({"level": LEVEL, "message": TEXT}, locations=listing(LOCATION))
INVOCATION = strict(
    {
        "executionSuccessful": {"type": "boolean"},
        "exitCode": {"type": "integer"},
        "toolExecutionNotifications": listing(NOTIFICATION),
    }
)
DRIVER = strict(
    {
        "name": {"const": "onnxkvrename"},
        "version": {"const": onnxkvrename.__version__},
        "rules": {**listing(RULE), "uniqueItems": True},
    }
)
RUN = strict(
    {
        "tool": strict({"driver": DRIVER}),
        "invocations": {**listing(INVOCATION), "minItems": 1, "maxItems": 1},
        "results": listing(RESULT),
    }
)
SCHEMA = strict(
    {
        "$schema": {"type": "string", "pattern": r"^https://.*/sarif-schema-2\.1\.0\.json$"},
        "version": {"const": "2.1.0"},
        "runs": {**listing(RUN), "minItems": 1, "maxItems": 1},
    }
)
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
MODEL, V = "decoder.onnx", ("--prefix", "VLLM")


def parse_run(text: str) -> dict[str, Any]:
    """Return the run of a valid log."""
    log = json.loads(text)
    VALIDATOR.validate(log)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [*CODES, "names"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    parsed: dict[str, Any] = run
    return parsed


@pytest.fixture
def here(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a sound model, a broken one and a text."""
    broken = models.decoder()
    broken.graph.output.pop()
    saved(broken, decoder.with_name("faulty.onnx"))
    saved(b"import onnx\n", decoder.with_name("text.onnx"))
    monkeypatch.chdir(decoder.parent)
    return decoder.parent


@pytest.mark.parametrize(
    ("args", "code", "rules"),
    [
        ((MODEL, *V), 0, set()),
        ((MODEL, *V, "--check"), 1, {"names"}),
        (("faulty.onnx", *V), 1, {"KV102"}),
        (("verify", MODEL), 0, set()),
        (("verify", MODEL, *V), 1, {"KV116"}),
        (("inspect", "faulty.onnx"), 1, {"KV102"}),
        (("manifest", "faulty.onnx"), 1, {"KV102"}),
        (("check-consumer", MODEL), 1, {"KV601"}),
        (("compare", MODEL, MODEL), 1, {"KV616"}),
    ],
)
def test_every_command_with_findings_gives_a_valid_log(
    args: tuple[str, ...], code: int, rules: set[str], here: Path, run: Run
) -> None:
    outcome = run(*args, "--format", "sarif")
    log = parse_run(outcome.out)
    (invocation,) = log["invocations"]
    assert outcome.code == invocation["exitCode"] == code
    assert invocation["executionSuccessful"]
    assert invocation["toolExecutionNotifications"] == []
    assert rules <= {result["ruleId"] for result in log["results"]}
    assert bool(rules) == bool(log["results"])


def test_a_result_names_the_rule_the_file_and_the_buffer(here: Path, run: Run) -> None:
    (result,) = parse_run(run("faulty.onnx", *V, "--format", "sarif").out)["results"]
    assert (result["ruleId"], result["level"]) == ("KV102", "error")
    assert result["message"]["text"].startswith("past_value.0 ")
    (location,) = result["locations"]
    assert location["physicalLocation"]["artifactLocation"] == {"uri": "faulty.onnx"}
    assert location["logicalLocations"] == [{"name": "past_value.0"}]


def test_rules_have_the_severity_and_the_meaning_of_their_code(here: Path, run: Run) -> None:
    log = parse_run(run("inspect", MODEL, "--format=sarif").out)
    for rule in log["tool"]["driver"]["rules"][:-1]:
        severity, meaning = CODES[rule["id"]]
        assert rule["defaultConfiguration"]["level"] == severity
        assert rule["help"]["text"] == rule["shortDescription"]["text"] == meaning


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((MODEL,), None),
        (("none.onnx", *V), "none.onnx"),
        ((MODEL, "text.onnx", *V), "text.onnx"),
        (("verify", "text.onnx"), "text.onnx"),
        (("inspect", "text.onnx"), "text.onnx"),
        (("manifest", "none.onnx"), "none.onnx"),
        (("check-consumer", MODEL, "--target", "nobody"), None),
        (("compare", MODEL), None),
        (("verify", MODEL, "--nonsense"), None),
    ],
)
def test_an_error_is_a_notification_in_a_valid_log(
    args: tuple[str, ...], path: str | None, here: Path, run: Run
) -> None:
    outcome = run(*args, "--format", "sarif")
    (invocation,) = parse_run(outcome.out)["invocations"]
    assert outcome.code == invocation["exitCode"] == 2
    assert not invocation["executionSuccessful"]
    (notification,) = invocation["toolExecutionNotifications"]
    assert notification["level"] == "error"
    locations = notification.get("locations", [])
    uris = [place["physicalLocation"]["artifactLocation"]["uri"] for place in locations]
    assert uris == ([] if path is None else [path])


@pytest.mark.parametrize(
    ("raised", "code"), [(ZeroDivisionError("/ 0"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_bug_or_an_interrupt_is_a_valid_log_too(
    raised: BaseException, code: int, here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **how: object) -> None:
        raise raised

    monkeypatch.setattr("onnxkvrename.api.files.rename_batch", fail)
    outcome = run(MODEL, *V, "--format", "sarif")
    (invocation,) = parse_run(outcome.out)["invocations"]
    assert outcome.code == invocation["exitCode"] == code
    assert len(invocation["toolExecutionNotifications"]) == 1


def test_a_manifest_as_sarif_can_go_to_a_file(here: Path, run: Run) -> None:
    outcome = run("manifest", "faulty.onnx", "--format", "sarif", "-o", "found.sarif")
    assert (outcome.code, outcome.out) == (1, "")
    log = parse_run((here / "found.sarif").read_text("utf-8"))
    assert {result["ruleId"] for result in log["results"]} == {"KV102"}


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("a/b c.onnx", "a/b%20c.onnx"),
        ("./a/../m.onnx", "m.onnx"),
        ("a:b#c?d%41é.onnx", "a%3Ab%23c%3Fd%2541%C3%A9.onnx"),
        (os.fsdecode(b"\xff\n.onnx"), "%FF%0A.onnx"),
        ("/elsewhere/m.onnx", "file:///elsewhere/m.onnx"),
    ],
)
def test_a_path_becomes_a_relative_uri(path: str, uri: str, here: Path) -> None:
    assert format_uri(path) == uri
    if not uri.startswith("file:"):
        assert format_uri(str(here / path)) == uri


def test_a_log_has_the_whole_text_of_findings_and_errors() -> None:
    """A service shortens it as it likes; here nothing is left out, as in JSON."""
    text = "first" + " word" * 900 + "n" * 9000 + " last"
    finding = onnxkvrename.Finding("KV101", "error", "past_key.0", text, "mend it")
    error = onnxkvrename.KvRenameError(text, path="m.onnx", hint="mend it")
    answer = Answer("rename", 2, str, files=(FileResult("m.onnx", (finding,), error),))
    log = "".join(line.text for line in FORMAT.render(answer, None))
    (run,) = json.loads(log)["runs"]
    (result,) = run["results"]
    assert result["message"]["text"] == f"past_key.0 {text} (mend it)"
    (notice,) = run["invocations"][0]["toolExecutionNotifications"]
    assert notice["message"]["text"] == f"m.onnx: {text} (mend it)"
