"""Load the sidecar formats: the modules of `formats`, and the files that rules name."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.rules.profile import Rules, SidecarRule
from onnxkvrename.sidecars import formats
from onnxkvrename.sidecars.format import SidecarFormat, SidecarFormats
from onnxkvrename.sidecars.json_tree import parse_json_tree
from onnxkvrename.sidecars.sections import find_texts
from onnxkvrename.sidecars.tree import Node
from onnxkvrename.sidecars.yaml_tree import parse_yaml_tree


def load_sidecar_formats(rules: Rules | None = None) -> SidecarFormats:
    """Return all formats, sorted by priority.

    Args:
        rules: Rules that may name further files; they are tried after the built-in formats.
    """
    built_in: list[SidecarFormat] = [
        import_module(f"{formats.__name__}.{module.name}").FORMAT
        for module in iter_modules(formats.__path__)
    ]
    of_rules = map(_build_rule_format, rules.sidecar_rules if rules is not None else ())
    return SidecarFormats((*sorted(built_in, key=lambda each: each.priority), *of_rules))


def _build_rule_format(rule: SidecarRule) -> SidecarFormat:
    return SidecarFormat(
        caption="a file that the rules name",
        priority=0,
        expected_form="JSON or YAML with names of inputs and outputs, or templates with %d",
        parse=_parse_json_or_yaml,
        find_names=find_texts,
        file_name_pattern=rule.file_pattern,
        effect=f"{rule.reader} does not find these inputs and outputs",
        is_binding=True,
        reader=rule.reader,
    )


def _parse_json_or_yaml(text: str) -> Node | None:
    """Return the tree of a text; one that begins like JSON, but is YAML, is parsed as that."""
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        with suppress(UnreadableTextError):
            return parse_json_tree(text)
    return parse_yaml_tree(text)
