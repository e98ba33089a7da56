"""The formats of sidecars, and the detection of a file's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import starmap

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.rules.pattern import match_name
from onnxkvrename.rules.profile import Rules
from onnxkvrename.sidecars.custom_io import CAPTION as CUSTOM_IO_CAPTION
from onnxkvrename.sidecars.custom_io import EXPECTED_FORM as CUSTOM_IO_FORM
from onnxkvrename.sidecars.custom_io import find_custom_io_names
from onnxkvrename.sidecars.tree import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    expect,
    parse_json_tree,
    parse_yaml_tree,
)

MODEL_SUFFIX = ".onnx"
"""How the name of a model ends in a configuration that refers to it."""
_LIST_KEY = re.compile("[A-Za-z0-9]+NodeInstanceNames")
_INPUTS, _OUTPUTS = "model.decoder.inputs", "model.decoder.outputs"
_CROSS_OUTPUTS = "model.encoder.outputs"
FindNames = Callable[[Node], Iterator[ScalarNode]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarFormat:
    """A format of text files that repeat the names of a model.

    A file has this format if its name shows it; otherwise if its content
    has one of the `markers`.

    Attributes:
        caption: The format's name in messages, for example ``custom I/O``.
        expected_form: A short description of the expected content, for messages.
        parse: Returns the tree of a text, ``None`` for an empty document. It raises
            `UnreadableTextError` for text that it cannot parse.
        find_names: Yields the scalars of a tree that are names of values. It raises
            `UnreadableTextError` for a tree of another form. ``None`` for a configuration by which
            a runtime binds inputs and outputs: any text in it may be a name or, with ``%d``, a
            template (:mod:`.bindings`).
        has_file_name: Returns a true value for the complete name of a file of this format.
        markers: Bytes that only files of this format contain.
        only_graph_values: True if every name is an input or output of the graph.
        requires_pairs: True if both sides of each buffer must be named.
        effect: What happens with names from before a rename, for messages.
        reader: What reads the file, for messages.
        default_names: Keys that may be left out, each with the object that has it, such as
            ``model.decoder.inputs``, and the template that counts then.
        reads_template: Whether the reader reads a template, by the keys that lead to it; those
            that it does not read are ignored. ``None`` if it may read all.
        max_name_bytes: The longest name that a template may make; ``None`` for any.
    """

    caption: str
    expected_form: str
    parse: Callable[[str], Node | None]
    find_names: FindNames | None = None
    has_file_name: Callable[[str], object] = lambda name: False
    markers: tuple[bytes, ...] = ()
    only_graph_values: bool = False
    requires_pairs: bool = False
    effect: str = "a compile ignores these entries"
    reader: str = "its reader"
    default_names: tuple[tuple[str, str, str], ...] = ()
    reads_template: Callable[[tuple[str, ...]], bool] | None = None
    max_name_bytes: int | None = None

    @property
    def is_binding(self) -> bool:
        """Whether any text may be a name of the models that its section refers to."""
        return self.find_names is None

    def names_models(self, data: bytes) -> bool:
        """Return whether a file says itself of which models it is."""
        return self.is_binding and MODEL_SUFFIX.encode() in data


def _find_batch_io_names(tree: Node) -> Iterator[ScalarNode]:
    """Yield the ``map-to`` of every entry that has one."""
    batches = expect(MappingNode, tree, "its content").get("IO-files")
    for batch in expect(SequenceNode, batches, "IO-files").items:
        for entry in batch.items if isinstance(batch, SequenceNode) else (batch,):
            name = expect(MappingNode, entry, "an entry of IO-files").get("map-to")
            if name is not None:
                yield expect(ScalarNode, name, "a map-to")


def _find_node_precision_names(tree: Node) -> Iterator[ScalarNode]:
    """Yield every name in the lists."""
    lists = expect(MappingNode, tree, "its content")
    if lists.get("<<") is not None:
        raise UnreadableTextError("is merged with another mapping (<<)")
    for key, names in lists.entries:
        is_empty = isinstance(names, ScalarNode) and names.value in ("", "null", "~")
        if isinstance(key, ScalarNode) and _LIST_KEY.fullmatch(key.value) and not is_empty:
            for name in expect(SequenceNode, names, key.value).items:
                yield expect(ScalarNode, name, f"a name in {key.value}")


def _reads_template(keys: tuple[str, ...]) -> bool:
    """Return whether a template is in ``model.SECTION.inputs`` or ``outputs``, on its own side."""
    if len(keys) != 4 or keys[0] != "model":
        return False
    key = keys[3].removeprefix("cross_")
    other_side = {"inputs": "present_", "outputs": "past_"}.get(keys[2])
    return other_side is not None and not key.startswith(other_side)


BUILT_IN = (
    # ``custom_io.yaml``: the precision of each input and output of a compiled model.
    #
    # QEfficient writes the file, the Cloud AI compiler reads it:
    # https://github.com/quic/efficient-transformers/blob/main/QEfficient/base/modeling_qeff.py
    # (``_compile``), and the Cloud AI SDK's page on custom I/O.
    SidecarFormat(
        caption=CUSTOM_IO_CAPTION,
        expected_form=CUSTOM_IO_FORM,
        parse=parse_yaml_tree,
        find_names=find_custom_io_names,
        has_file_name=re.compile(r"custom_io.*\.ya?ml").fullmatch,
        markers=(b"IOName",),
        only_graph_values=True,
        requires_pairs=True,
    ),
    # ``aic_batch_io.json``: the files that qaic-runner reads inputs from and writes outputs to.
    #
    # Only ``map-to`` names a buffer. Paths of files that contain a buffer's name stay, because the
    # files keep their names.
    #
    # QEfficient writes the file, the SDK's ``qaic-runner`` reads it:
    # https://github.com/quic/efficient-transformers/blob/main/QEfficient/utils/generate_inputs.py
    # and the callers of ``write_io_files``.
    SidecarFormat(
        caption="batch I/O",
        expected_form="IO-files with lists of entries with map-to",
        parse=parse_json_tree,
        find_names=_find_batch_io_names,
        has_file_name=re.compile(r"aic_batch_io.*\.json").fullmatch,
        markers=(b'"IO-files"',),
        only_graph_values=True,
    ),
    # Node-precision files (NPI): the tensors that are computed in another precision.
    #
    # ``FP32NodeInstanceNames`` and similar keys list outputs of nodes, also of nodes within local
    # functions (``past_key.53_InternalRetainedState``), which are renamed if they change there.
    #
    # QEfficient has examples in ``examples/**/*npi*.yaml``
    # (https://github.com/quic/efficient-transformers); Glow reads them with
    # ``-node-precision-info``.
    SidecarFormat(
        caption="node precision",
        expected_form="FP32NodeInstanceNames or FP16NodeInstanceNames, and a list of names",
        parse=parse_yaml_tree,
        find_names=_find_node_precision_names,
        markers=(b"NodeInstanceNames",),
    ),
    # ``genai_config.json``: how onnxruntime-genai binds the inputs and outputs of its models.
    #
    # Names are templates (``"past_key_names": "past_key_values.%d.key"``) or, in a pipeline, lists.
    # Templates are read in the inputs and outputs of a model's section, and nowhere else. A key
    # that is left out has a default, which is not in the file, so no rename can change it:
    # https://github.com/microsoft/onnxruntime-genai/blob/main/src/config.h
    SidecarFormat(
        caption="a configuration of onnxruntime-genai",
        expected_form="model.decoder with inputs and outputs",
        parse=parse_json_tree,
        has_file_name=re.compile(r"genai_config\.json").fullmatch,
        effect="onnxruntime-genai fails at the first token",
        reader="onnxruntime-genai",
        default_names=(
            ("past_key_names", _INPUTS, "past_key_values.%d.key"),
            ("past_value_names", _INPUTS, "past_key_values.%d.value"),
            ("past_conv_names", _INPUTS, "past_key_values.%d.conv_state"),
            ("past_recurrent_names", _INPUTS, "past_key_values.%d.recurrent_state"),
            ("present_key_names", _OUTPUTS, "present.%d.key"),
            ("present_value_names", _OUTPUTS, "present.%d.value"),
            ("present_conv_names", _OUTPUTS, "present.%d.conv_state"),
            ("present_recurrent_names", _OUTPUTS, "present.%d.recurrent_state"),
            ("past_conv_names", _INPUTS, "past_conv.%d"),  # until 0.17
            ("present_conv_names", _OUTPUTS, "present_conv.%d"),
            ("cross_present_key_names", _CROSS_OUTPUTS, "present_key_cross_%d"),
            ("cross_present_value_names", _CROSS_OUTPUTS, "present_value_cross_%d"),
        ),
        reads_template=_reads_template,
        max_name_bytes=63,
    ),
    # ``inference_metadata.yaml``: how onnx-genai binds the inputs and outputs of mobius' models.
    #
    # Names are lists, and entries with shapes:
    # https://github.com/onnxruntime/mobius
    SidecarFormat(
        caption="inference metadata",
        expected_form="model.io with the names of inputs and outputs",
        parse=parse_yaml_tree,
        has_file_name=re.compile(r"inference_metadata\.ya?ml").fullmatch,
        effect="onnx-genai does not find these inputs and outputs",
        reader="onnx-genai",
    ),
    # ``metadata.json`` of a bundle for QNN: the inputs and outputs of each of its graphs.
    #
    # Qualcomm AI Hub writes the file beside the graphs, and programs that run a bundle by
    # themselves read shapes and types in it by name: https://github.com/quic/ai-hub-models
    SidecarFormat(
        caption="bundle metadata",
        expected_form="model_files with inputs and outputs by name",
        parse=parse_json_tree,
        markers=(b'"model_files"',),
        effect="a program that reads the bundle does not find these inputs and outputs",
        reader="a program that runs the bundle",
    ),
)
"""The built-in formats, in the order in which they are tried."""


def load_sidecar_formats(rules: Rules) -> tuple[SidecarFormat, ...]:
    """Return all formats, in the order in which they are tried.

    Rules may name further files; these are tried after the built-in formats.
    """
    return (*BUILT_IN, *starmap(_build_rule_format, rules.sidecars.items()))


def detect_format(
    formats: Sequence[SidecarFormat], file_name: str, data: bytes = b""
) -> SidecarFormat | None:
    """Return the format of a file: that of its name, or else that of its content, if any.

    Args:
        formats: The known formats.
        file_name: The name of the file, without its directory.
        data: The content, or the beginning of it.
    """
    by_name = (each for each in formats if each.has_file_name(file_name))
    by_content = (each for each in formats if any(marker in data for marker in each.markers))
    return next(by_name, None) or next(by_content, None)


def describe_formats(formats: Sequence[SidecarFormat]) -> str:
    """Return the captions of all formats, for a message."""
    return "known formats: " + ", ".join(dict.fromkeys(each.caption for each in formats))


def _build_rule_format(file_pattern: str, reader: str) -> SidecarFormat:
    return SidecarFormat(
        caption="a file that the rules name",
        expected_form="JSON or YAML with names of inputs and outputs, or templates with %d",
        parse=_parse_json_or_yaml,
        has_file_name=partial(match_name, file_pattern),
        effect=f"{reader} does not find these inputs and outputs",
        reader=reader,
    )


def _parse_json_or_yaml(text: str) -> Node | None:
    """Return the tree of a text; one that begins like JSON, but is YAML, is parsed as that."""
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        with suppress(UnreadableTextError):
            return parse_json_tree(text)
    return parse_yaml_tree(text)
