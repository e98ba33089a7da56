"""The directory of an export by QEfficient, its files in windows, and the calls that take one back.

Large models are exported window by window, and merged afterwards. Files whose names fit are parts
of one set; every other model stands alone. No rules but the profile ``qeff`` have sets and calls.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.files.read import is_in_memory, read_status

WINDOW, PREFIXED, MERGED = STAGES = ("window", "prefixed", "merged")
"""The stages of a set's parts: as exported, prepared for the merge, merged."""
_DIRECTORY_PATTERN = r"(?s)(.+)-([0-9a-f]{16})"
_LEVELS = 3
"""The number of directories above a model that may be the directory of its export."""
PARAMS_FILE = "hashed_export_params.json"
"""The file in which QEfficient saves the parameters of an export."""
_LAYER = "0|[1-9][0-9]{0,5}"
PROFILE = "qeff"
"""The profile of exports by QEfficient."""


class PartName(NamedTuple):
    """The stage and layers in the file name of a part.

    Attributes:
        stage: One of `STAGES`.
        model_name: The model's name, empty if the file name does not say it.
        first_layer: The first layer.
        end_layer: The layer after the last, ``None`` if the file name does not say it.
    """

    stage: str
    model_name: str
    first_layer: int
    end_layer: int | None


class PartPath(NamedTuple):
    """The location of a part of a set, and the content of its file name.

    Attributes:
        root: The directory that all files of the set have in common, with ``/`` between
            names; empty for the working directory.
        name: The stage, model and layers that the file name says.
    """

    root: str
    name: PartName


class PartRule(NamedTuple):
    """The names of the files of one stage, and of the folder around each, if there is one."""

    stage: str
    file_pattern: re.Pattern[str]
    folder_pattern: re.Pattern[str] | None = None

    def match(self, file: str) -> PartName | None:
        """Split the name of a file, or return ``None`` if it does not match."""
        match = self.file_pattern.fullmatch(file)
        if match is None:
            return None
        groups = match.groupdict()
        end = groups.get("end")
        return PartName(
            self.stage,
            groups.get("model", ""),
            int(groups["first"]),
            None if end is None else int(end),
        )


class SetRule(NamedTuple):
    """The files that are parts of one model, and their common values.

    Names of values are meant without their scope.

    Attributes:
        part_rules: The names of the files; the first that matches counts.
        seam: The output of a window, and the input of the next one that receives it.
        shared_inputs: The inputs that all windows share.
        exclusive_kinds: Kinds of buffers of which a model has at most one.
    """

    part_rules: tuple[PartRule, ...] = ()
    seam: tuple[str, str] | None = None
    shared_inputs: tuple[str, ...] = ()
    exclusive_kinds: frozenset[str] = frozenset()

    def parse_path(self, path: str) -> PartPath | None:
        """Return what the path of a model, with ``/`` between names, says about a set.

        ``None`` outside of sets.
        """
        *directories, file = path.split("/")
        kept_directories = [name for name in directories if name not in ("", ".")]
        for rule in self.part_rules:
            name = rule.match(file)
            if name is not None:
                folder = rule.folder_pattern
                if folder and kept_directories and folder.fullmatch(kept_directories[-1]):
                    kept_directories.pop()
                return PartPath("/" * path.startswith("/") + "/".join(kept_directories), name)
        return None


NO_SETS = SetRule()
WINDOW_SETS = SetRule(
    (
        PartRule(
            WINDOW,
            re.compile(rf"(?s)(?P<model>.+)_layer_tmp_(?P<first>{_LAYER})_(?P<end>{_LAYER})\.onnx"),
            re.compile("layer_[0-9]+_[0-9]+"),
        ),
        PartRule(PREFIXED, re.compile(rf"pref_(?P<first>{_LAYER})\.onnx")),
        PartRule(MERGED, re.compile(rf"merged_(?P<first>{_LAYER})-(?P<end>{_LAYER})\.onnx")),
    ),
    seam=("logits", "inputs_embeds"),
    shared_inputs=("position_ids",),
    exclusive_kinds=frozenset({"attention", "mla"}),
)
"""After QEfficient's base/modeling_qeff.py (`_export_layerwise`) and utils/layerwise_pipeline.py.

``layer_{a}_{b}`` stands around each window, merges go from the last window to the first and all end
where that one does.
"""


def format_compile_call(inputs: Iterable[str], path: str | None, token: str) -> str:
    """Return the call that gives a renamed model back to QEfficient, as Python source.

    Args:
        inputs: The model's graph inputs.
        path: The renamed model; ``None`` if QEfficient finds it in its cache.
        token: Its token.
    """
    if path is None:
        return f'model.compile(kv_cache_prefix="{token}")'
    names = {name.rpartition("/")[2] for name in inputs}
    # The decoder of Llama-3.2-Vision has no vision_embeds; its encoder fills KV buffers.
    is_beside_encoder = not names.isdisjoint(("vision_embeds", "cross_attention_mask"))
    is_language_model = is_beside_encoder and "pixel_values" not in names
    argument = "lang_onnx_path" if is_language_model else "onnx_path"
    quoted = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'model.compile({argument}="{quoted}", kv_cache_prefix="{token}")'


def split_directory_name(directory: str) -> tuple[str, str] | None:
    """Return name and hash, ``None`` for a directory that is not named like one of the cache."""
    match = re.fullmatch(_DIRECTORY_PATTERN, directory)
    return (match[1], match[2]) if match else None


def find_exports(model: Path) -> Iterator[Path]:
    """Yield the directories above a model that hold the parameters of an export.

    Raises:
        ModelError: It cannot be determined if one does.
    """
    for directory in list(Path(os.path.abspath(model)).parents)[:_LEVELS]:
        status = read_status(directory / PARAMS_FILE)
        if status is not None and stat.S_ISREG(status.st_mode):
            yield directory


def find_cached_export(path: Path) -> Path | None:
    """Return the directory of the export of QEfficient's cache that a path is in, or is.

    It is written as the start of the path, if it can be. What cannot be determined is none.
    """
    places = () if is_in_memory(path) else (path, path / PARAMS_FILE)
    with suppress(KvRenameError):
        for inner in places:
            for directory in find_exports(inner):
                if split_directory_name(directory.name):
                    return shorten_path(directory, inner)
    return None


def shorten_path(directory: Path, model: Path) -> Path:
    """Return a directory above a model as the start of the model's path, if it is one."""
    for parent in model.parents:
        if Path(os.path.abspath(parent)) == directory:
            return parent
    return directory
