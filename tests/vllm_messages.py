"""The messages of a version of vLLM about KV caches: which are mapped, left, or new.

They are read from the sources in a wheel with `ast`; nothing of vLLM is run. As a script:
``python tests/vllm_messages.py [VERSION...]`` prints them for the wheels that `vllmwheel` finds,
those that `onnxkvrename explain --log` knows, those in `LEFT`, and new ones, with where they are.
A new one needs a row in `onnxkvrename/vllm/messages.toml`, or a reason in `LEFT`.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vllmwheel import find_wheel

from onnxkvrename.vllm.messages import VllmMessage, load_messages, match_message

VERSIONS = ("0.24", "0.33")
_MODULES = re.compile(
    r"vllm/(?:distributed/kv_transfer/kv_connector/"
    r"(?:factory|utils|v1/base|v1/ssm_conv_transfer_utils|v1/nixl/\w+)"
    r"|v1/core/(?:kv_cache_\w+|single_type_kv_cache_manager)|v1/kv_cache_\w+"
    r"|v1/worker/(?:utils|kv_connector_model_runner_mixin|gpu/attn_utils|gpu/kv_connector)"
    r"|config/(?:cache|kv_transfer))\.py"
)
_LOG_METHODS = {"warning", "warning_once", "error", "exception", "critical"}
LEFT = {
    "vLLM's own invariants: no setting is known that breaks them": (
        "3-read requires DS",
        "A KV cache layer spans",
        "All R-SWA layers",
        "All TQ layers",
        "All attention layers in the same KV cache group must be",
        "All attention layers in the same KV cache group must have the same attention spec",
        "All attention layers in the same KV cache group must use the same",
        "All layers in the same KV cache group",
        "Cannot determine layout for tensor",
        "Cannot register local engine",
        "ChunkedLocalAttentionManager",
        "Compressed caches must be packed",
        "Computed blocks should be",
        "Conflicting ",
        "CrossAttentionManager",
        "Expected 2D conv state",
        "Expected same manager class",
        "Expected the dim `num_blocks`",
        "Expected {len(self.kv_cache_groups)}",
        "FA desc flags",
        "FA region blocks",
        "FullAttentionManager",
        "Group index",
        "HybridKVCacheCoordinator",
        "Invalid block found",
        "Invalid index type",
        "KV cache group overlaps",
        "KV cache groups miss",
        "KV cache layers outside",
        "KV cache layout has not been resolved",
        "KV cache tensors must share",
        "Local KV cache base addresses",
        "MLAAttentionSpec should be merged",
        "MambaManager",
        "No manager registered",
        "NixlConnectorScheduler expects",
        "Number of KV cache groups must match",
        "Only one group is supported",
        "PLE region registered",
        "Remote KV cache base addresses",
        "Remote advertised",
        "Remote packed layer",
        "Remote region metadata",
        "SlidingWindowManager",
        "Some layers are not",
        "Speculative Mamba blocks",
        "The block already has a hash",
        "UnitaryKVCacheCoordinator",
        "Unknown spec type",
        "Unknown supported size",
        "Unsupported KVConnectorRole",
        "Unsupported model version",
        "block_stride_alignment",
        "get_required_kvcache_layout",
        "group_size must be",
        "host_buffer: ",
        "host_xfer_buffer should",
        "manager_class is required",
        "next_free_block",
        "num_free_blocks",
        "prev_free_block",
        "remove() called",
        "values must be",
        "{cache.shape[0]} kernel blocks",
        "{kvcache_spec_cls.__name__} must inherit",
        "{layer_name}: {kv.shape[0]}",
        "{req_id} not found",
    ),
    "the memory or the device of one worker, whatever the other one is": (
        "Add {} padding layers",
        "Cannot auto-fit max_model_len",
        "Externally held weights",
        "Free memory on device",
        "Mixed-device KV",
        "NIXL host staging",
        "NIXL is not available",
        "NIXL pull does not yet support a mixed-memory",
        "NaNs detected",
        "NixlPushConnector does not support mixed-memory",
        "No free blocks available",
        "On XPU platform",
        "VLLM batch_invariant",
        "os.sched_setaffinity",
        "{self.device_type}",
    ),
    "a request, or who talks to whom, whatever the caches are": (
        "Connection listener got",
        "Could not check local NIXL",
        "Declining expired",
        "Failed handshake to D",
        "Failed to decode PUSH_REG",
        "Got invalid KVTransferParams",
        "Local NIXL metadata for remote engine",
        "NIXL dlist-handle release",
        "NIXL remote-engine cleanup",
        "NixlPushConnector: registration",
        "No blocks to push",
        "No local blocks to push",
        "No remote agents",
        "PUSH_REG notif",
        "Potentially invalid KV blocks",
        "Releasing expired",
        "Remote NIXL agent engine ID mismatch",
        "Skipping KV post-processing",
        "Unexpected socket type",
        "Unrecognized request",
        "_do_start_push_kv",
        "nixl-push-writer",
    ),
    "an option of one worker, and the message says what to change": (
        "A model-declared get_kv_cache_groups",
        "Bidirectional KV transfer",
        "CSA-linear NIXL requires at most one",
        "Class {connector_name}",
        "Connector '",
        "Connector name is not set",
        "HiSparseConnector",
        "Initializing KVConnectorBase",
        "Invalid kv_cache_dtype",
        "NixlConnector PCP producers",
        "Only one HiSparseConnector",
        "Please specify kv_role",
        "Speculative decoding (method",
        "The `--calculate-kv-scales`",
        "The kv-cache-dtype",
        "Unable to detect current VLLM config",
        "Unknown KV cache layout",
        "Unsupported connector type",
        "Unsupported kv_role",
        "Using kv_role='kv_both'",
        "kv_connector_module_path",
        "kv_transfer_config must be set",
    ),
    "prefix caching within one worker": (
        "Disabling fine-grained prefix-cache",
        "Each KV cache group's real block_size",
        "Invalid hash_block_size",
        "Invalid prefix_match_unit",
        "Mamba prefix caching requires",
        "Multi-module MTP with prefix caching",
        "PYTHONHASHSEED is not set",
        "Should not be called as prefix caching",
        "Using a random per-process NONE_HASH",
        "VLLM_PREFIX_CACHE_RETENTION_INTERVAL",
        "block_size must be divisible by hash_block_size",
        "prefix_cache_retention_interval",
    ),
    "the message before it says why": (
        "NIXL transfer failure",
        "NIXLConnectorWorker gets",
        "{msg}",
    ),
    "not about KV caches that are transferred": (
        "Expected multimodal embeddings",
        "Expected number of multimodal",
        "Sequence parallelism requires",
        "num_new_tokens must be",
        "sample_rate must be",
        "watermark must be",
    ),
}
"""Why a message is not explained, and how such messages begin."""


class Message(NamedTuple):
    """A message in vLLM's sources.

    Attributes:
        place: The module and the line.
        text: Its text; each value is an expression in braces.
    """

    place: str
    text: str


@cache
def collect_messages(wheel: Path) -> tuple[Message, ...]:
    """Return the messages that the modules about KV caches raise or log, in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(filter(_MODULES.fullmatch, archive.namelist()))
        return tuple(
            Message(f"{name}:{node.lineno}", _read_text(node))
            for name in names
            for node in _find_texts(ast.parse(archive.read(name)))
        )


def _find_texts(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the expressions that are messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.exc.args[0]
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield node.msg
        elif isinstance(node, ast.Call) and node.args and _is_log_call(node.func):
            yield node.args[0]


def _is_log_call(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in _LOG_METHODS
        and ast.unparse(function.value).endswith("logger")
    )


def _read_text(node: ast.expr) -> str:
    """Return the text of an expression; what is computed is in braces, as in an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub("%[-+.0-9]*[sdrfx]", "{}", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_read_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _read_text(node.left) + _read_text(node.right)
    value = node.value if isinstance(node, ast.FormattedValue) else node
    return f"{{{ast.unparse(value)}}}"


def find_row(message: Message) -> VllmMessage | None:
    """Return the row of the table that explains a message."""
    rows = (row for row in load_messages() if match_message(row, message.text) is not None)
    return next(rows, None)


def find_reason(message: Message) -> str | None:
    """Return why a message is left."""
    return next((reason for reason, texts in LEFT.items() if message.text.startswith(texts)), None)


def list_new(wheel: Path) -> list[Message]:
    """Return the messages that are neither explained nor left."""
    return [
        message
        for message in collect_messages(wheel)
        if find_row(message) is None and find_reason(message) is None
    ]


def main(versions: list[str]) -> None:
    """Print the messages of some versions, by what becomes of each."""
    for version in versions or VERSIONS:
        wheel = find_wheel(f"{version}.0")
        if isinstance(wheel, str):
            print(f"vLLM {version}: {wheel}")
            continue
        messages = collect_messages(wheel)
        print(f"vLLM {version}: {len(messages)} messages")
        for message in messages:
            row = find_row(message)
            state = row.code if row else find_reason(message) or "NEW"
            print(f"  {message.place}  {message.text!r}\n    {state}")


if __name__ == "__main__":
    main(sys.argv[1:])
