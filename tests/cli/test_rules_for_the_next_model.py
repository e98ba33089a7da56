"""Rules that `pairs` writes for a model hold for the next one of its exporter."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import FIXTURES, Run
from exporter_models import build_model, list_caches
from models import saved
from named_decoders import NAMERS, Namer, build_named_decoder

RULES = ("--rules", "rules.toml")


def name_as(inputs: str, outputs: str) -> Namer:
    """Names with ``{layer}`` and ``{part}`` on each side."""
    return lambda part, layer: (
        inputs.format(part=part, layer=layer),
        outputs.format(part=part, layer=layer),
    )


NAMES: dict[str, Namer] = {
    **{name: namer for name, namer in NAMERS.items() if name != "dynamo"},
    "own words": name_as("kv.{layer}.{part}_in{{0}}", "kv.{layer}.{part}_out{{0}}"),
    "in a word": name_as("past_{part}{layer}", "new_{part}{layer}"),
    "before the layer": name_as("{part}[{layer}]", "new {part}[{layer}]"),
    "other numbers": name_as("m2.{layer}.{part}", "m2.next3.{layer}.{part}"),
    "a path": name_as("/layers.{layer}/{part}", "/layers.{layer}/{part}/next"),
}
LAYERS = (
    *(("growing",), ("static",), ("fused",), ("recurrent", "growing")),
    *(("growing", "static"), ("recurrent", "recurrent", "static"), ("cross", "growing")),
)
CASES = [
    *((name, LAYERS[number % len(LAYERS)]) for number, name in enumerate(NAMES)),
    *((name, layers) for name in ("own words", "qnn") for layers in LAYERS),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rules(run: Run, *models: str | Path) -> str:
    outcome = run("pairs", *models, "--as", "rules")
    assert (outcome.code, outcome.err) == (0, "")
    Path("rules.toml").write_text(outcome.out, "utf-8")
    return outcome.out


def rename_there_and_back(model: str, run: Run) -> dict[str, str]:
    """Rename, verify and strip a model by the rules, and return the new names."""
    before = Path(model).read_bytes()
    renamed = run(model, "--prefix", "KV", "-o", "renamed.onnx", *RULES)
    assert renamed.code == 0, renamed.err
    verified = run("verify", "renamed.onnx", *RULES)
    assert verified.code == 0, verified.err
    assert run("renamed.onnx", "--strip", "-o", "back.onnx", *RULES).code == 0
    assert Path("back.onnx").read_bytes() == before
    for result in ("renamed.onnx", "back.onnx"):
        Path(result).unlink()
    return dict(line.split(" -> ") for line in renamed.out.splitlines())


def save_decoder(name: str, kinds: tuple[str, ...], count: int, file: str) -> set[str]:
    """Save a decoder with some layers, which repeat those kinds, and return its buffers' names."""
    layers = [kinds[number % len(kinds)] for number in range(count)]
    decoder = build_named_decoder(NAMES[name], layers)
    saved(decoder.model, Path(file))
    return {name for pair in decoder.buffers.items() for name in pair}


@pytest.mark.parametrize(("name", "kinds"), CASES)
def test_the_rules_of_a_small_model_rename_a_large_one(
    name: str, kinds: tuple[str, ...], run: Run
) -> None:
    small = save_decoder(name, kinds, max(2, len(kinds)), "small.onnx")
    large = save_decoder(name, kinds, 13, "large.onnx")
    rules = write_rules(run, "small.onnx")
    assert rules.count("[[kv]]") <= len({*kinds}) * 2
    assert rename_there_and_back("small.onnx", run).keys() == small
    names = rename_there_and_back("large.onnx", run)
    assert names.keys() == large
    write_rules(run, "large.onnx")
    assert rename_there_and_back("large.onnx", run) == names


def test_the_rules_name_parts_and_roles(run: Run) -> None:
    caches = list_caches(("kv.{layer}.{part}_in", "kv.{layer}.{part}_out"), parts=["k", "v"])
    saved(build_model(caches), Path("m.onnx"))
    assert write_rules(run, "m.onnx").split("\n\n")[1:] == [
        "[[kv]]\n"
        'kind = "attention"\n'
        "input = 'kv\\.{layer}\\.(?P<part>k|v)_in{token}'\n"
        "output = 'kv\\.{layer}\\.(?P<part>k|v)_out{token}'\n"
        'roles = { key = "k", value = "v" }\n'
        'update = "append"\n'
    ]
    shown = run("profiles", "--match", "m.onnx", *RULES).out
    assert "kv.1.v_out{token}  kv[0]  attention  v     1" in shown


@pytest.mark.parametrize("names", [("n_{layer}_in", "n_{layer}_out"), ("n.{layer}", "m.{layer}")])
def test_after_the_rename_the_rules_are_asked_for(names: tuple[str, str], run: Run) -> None:
    saved(build_model(list_caches(names, parts=["k"])), Path("m.onnx"))
    write_rules(run, "m.onnx")
    assert run("m.onnx", "--prefix", "KV", *RULES).code == 0
    outcome = run("verify", "m.onnx")
    assert (outcome.code, "names already carry KV" in outcome.err) == (1, True)
    assert "add `--rules FILE` with the rules of the rename" in outcome.err
    assert "all names carry KV" in run("pairs", "m.onnx", "--as", "rules").err


def test_new_names_are_those_of_a_profile(run: Run) -> None:
    save_decoder("qnn", ("growing",), 2, "m.onnx")
    by_profile = run("m.onnx", "--prefix", "KV", "-n").out
    write_rules(run, "m.onnx")
    assert run("m.onnx", "--prefix", "KV", "-n", *RULES).out == by_profile


@pytest.mark.parametrize(
    ("others", "is_pattern", "kept"),
    [
        (["past.2.key"], False, ""),  # the pattern would take it for a cache of layer 2
        (["past.0.key_scale"], True, "past\\.[0-9]+\\.key_scale"),  # for one with a token
        (["past.2.key", "past.0.key_scale"], False, "past\\.0\\.key_scale"),
        (["past.x.key", "past.2.keys"], True, ""),
    ],
)
def test_a_pattern_that_takes_another_value_is_not_written(
    others: list[str], is_pattern: bool, kept: str, run: Run
) -> None:
    model = build_model(list_caches(("past.{layer}.{part}", "present.{layer}.{part}")))
    for name in others:
        model.graph.input.append(model.graph.input[1])
        model.graph.input[-1].name = name
    saved(model, Path("m.onnx"))
    rules = write_rules(run, "m.onnx")
    assert ("{layer}" in rules) == is_pattern
    keep = f"[[keep]]\nreason = \"not a state\"\npattern = '{kept}'\n"
    assert rules.partition("[[keep]]")[2] == (keep.removeprefix("[[keep]]") if kept else "")
    assert len(rename_there_and_back("m.onnx", run)) == 8


def test_names_without_a_convention_are_listed(run: Run) -> None:
    caches = list_caches(("past_{layer}_{part}", "cat_{layer}{part}7"), parts=["0", "1"])
    numbers = iter((7, 8, 11, 12))
    caches = [each._replace(output=f"cat_{next(numbers)}") for each in caches]
    saved(build_model(caches), Path("m.onnx"))
    rules = write_rules(run, "m.onnx")
    assert ("{layer}" in rules, rules.count("[[kv]]")) == (False, 4)
    assert len(rename_there_and_back("m.onnx", run)) == 8


def test_prefill_and_decode_have_one_file(run: Run) -> None:
    caches = list_caches(("past.{layer}.{part}", "present.{layer}.{part}"))
    saved(build_model(caches), Path("decode.onnx"))
    first = [each._replace(input=None, shape=each.grown) for each in caches]
    saved(build_model(first), Path("prefill.onnx"))
    alone = run("pairs", "prefill.onnx", "--as", "rules")
    assert (alone.code, "no cache found in the graph" in alone.err) == (2, True)
    both = write_rules(run, "prefill.onnx", "decode.onnx")
    assert both.startswith("# prefill.onnx, decode.onnx, found by dataflow")
    assert 'alone = ["output"]' in both
    assert len(rename_there_and_back("decode.onnx", run)) == 8
    assert len(rename_there_and_back("prefill.onnx", run)) == 4


def test_several_models_with_other_caches_have_one_file(run: Run) -> None:
    for name, parts in (("a", ("k", "v")), ("b", ("x", "y", "z"))):
        names = (f"{name}.{{layer}}.{{part}}", f"new.{name}.{{layer}}.{{part}}")
        saved(build_model(list_caches(names, parts=parts)), Path(f"{name}.onnx"))
    assert write_rules(run, "a.onnx", "b.onnx").count("[[kv]]") == 2
    assert len(rename_there_and_back("a.onnx", run)) == 8
    assert len(rename_there_and_back("b.onnx", run)) == 12


def test_windows_have_one_file(run: Run) -> None:
    write_rules(run, FIXTURES / "plain" / "windows")
    source = FIXTURES / "plain" / "windows"
    assert run(source, "--prefix", "VLLM", "-d", "new", *RULES).code == 0
    for path in Path("new").rglob("*.onnx"):
        renamed = FIXTURES / "VLLM" / "windows" / path.relative_to("new")
        assert path.read_bytes() == renamed.read_bytes()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        # another output
        (
            [("past.0.k", "cat_9")],
            "past.0.k -> present.0.k grows along axis 2 in a.onnx, "
            "but past.0.k -> cat_9 grows along axis 2 in b.onnx",
        ),
        # another input
        (
            [("past.0.x", "present.0.k")],
            "past.0.k -> present.0.k grows along axis 2 in a.onnx, "
            "but past.0.x -> present.0.k grows along axis 2 in b.onnx",
        ),
        # not a cache
        (
            [("y", "present.0.y"), ("w", "present.0.k")],
            "past.0.k -> present.0.k grows along axis 2 in a.onnx, "
            "but present.0.k is not a cache in b.onnx",
        ),
    ],
)
def test_models_that_contradict_each_other_are_one_error(
    other: list[tuple[str | None, str]], said: str, run: Run
) -> None:
    (cache,) = list_caches(("past.{layer}.{part}", "present.{layer}.{part}"), [0], ["k"])
    saved(build_model([cache]), Path("a.onnx"))
    caches = [cache._replace(input=name, output=output) for name, output in other]
    model = build_model(caches)
    for made in model.graph.node:  # made from the tokens alone
        made.input[:] = [
            "x" if name == "w" and made.op_type == "Concat" else name for name in made.input
        ]
    saved(model, Path("b.onnx"))
    outcome = run("pairs", "a.onnx", "b.onnx", "--as", "rules")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"error: one rules file cannot be for both: {said} "
        "(write one for each model: `onnxkvrename pairs b.onnx --as rules`)\n"
    )


def test_a_model_without_a_cache_is_named_among_others(run: Run) -> None:
    caches = list_caches(("past.{layer}.{part}", "present.{layer}.{part}"))
    saved(build_model(caches), Path("a.onnx"))
    saved(build_model([]), Path("b.onnx"))
    outcome = run("pairs", "a.onnx", "b.onnx", "--as", "rules")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: b.onnx: no cache found in the graph")


@pytest.mark.parametrize(
    ("command", "count"), [("folder --prefix VLLM", 2), ("verify folder", 2), ("folder", 1)]
)
def test_kv001_has_one_command_for_all_models_of_one_file(
    command: str, count: int, run: Run
) -> None:
    """Two models of one folder, or two whose names contradict each other."""
    Path("folder").mkdir()
    (cache,) = list_caches(("past.{layer}.{part}", "present.{layer}.{part}"), [0], ["k"])
    other = cache._replace(input="in_k_0", output="out_k_0")
    if count == 1:
        command, other = f"{command} --prefix VLLM", cache._replace(output="next.0.k")
    saved(build_model([cache]), Path("folder/a.onnx"))
    saved(build_model([other]), Path("folder/b.onnx"))
    outcome = run(*command.split())
    assert outcome.code == 1
    asked = " ".join(f"folder/{name}.onnx" for name in "ab"[:count])
    rules = f"pairs {asked} --as rules"
    assert f"`onnxkvrename {rules} > rules.toml`, then `onnxkvrename" in outcome.err
    assert write_rules(run, *asked.split())
    if count == 2:
        assert run("folder", "--prefix", "VLLM", *RULES).code == 0
        assert run("verify", "folder", *RULES).code == 0
