"""Lay files out as in a Hugging Face cache: snapshots of links into blobs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

REVISION = "8d1f9f4c0e1b6a2d3c4b5a69788796a5b4c3d2e1"


def store_in_cache(cache: Path, folder: Path, name: str = "models--me--tiny-ONNX") -> Path:
    """Move a folder into a cache.

    Args:
        cache: The directory of the cache.
        folder: The folder; it is empty in the end.
        name: The directory of the repository.

    Returns:
        The snapshot, whose files are links.
    """
    repository = cache / name
    snapshot = repository / "snapshots" / REVISION
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(blob)
            link = snapshot / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot
