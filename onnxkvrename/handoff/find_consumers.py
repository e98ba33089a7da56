"""Find consumers by name: the modules of `consumers/`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from onnxkvrename.errors import KvRenameError
from onnxkvrename.handoff import consumers
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.text import suggest_similar

DEFAULT_CONSUMER = "vllm-qaic"
"""The consumer of a command without ``--target``."""


def list_consumers() -> tuple[str, ...]:
    """Return the names of all consumers in alphabetical order, without loading any."""
    modules = iter_modules(consumers.__path__)
    return tuple(sorted(module.name.replace("_", "-") for module in modules))


def load_consumer(name: str) -> Consumer:
    """Return the consumer of this name; the error for another one suggests a known one.

    Raises:
        KvRenameError: There is no such consumer.
    """
    if name in list_consumers():
        module = import_module(f"{consumers.__name__}.{name.replace('-', '_')}")
        consumer: Consumer = module.CONSUMER
        return consumer
    known = list_consumers()
    hint = suggest_similar(name, known) or f"targets: {', '.join(known)}"
    raise KvRenameError(f"no such target: {name}", hint=hint)


def choose_token(name: str, prefix: str | None, *, strip: bool) -> str | None:
    """Return the token for a rename whose results a consumer will use.

    It is the consumer's own, or else `prefix` from the command line. With `strip` the rename
    removes it.

    Raises:
        KvRenameError: There is no such consumer; it requires another token; or the token is
            missing.
    """
    consumer = load_consumer(name)
    if not consumer.token:
        if prefix is None and not strip:
            raise KvRenameError(
                f"--target {name} has no token of its own: it selects names without one",
                hint="pass --prefix TOKEN, or leave the names as they are and check them with "
                f"`verify --target {name}`",
            )
        return prefix
    if strip:
        raise KvRenameError(
            f"--strip and --target {name} cannot be combined: {name} requires its token"
        )
    if prefix not in (None, consumer.token):
        raise KvRenameError(
            f"--prefix {prefix}: {name} requires {consumer.token}",
            hint=f"`--target {name}` alone sets it",
        )
    return consumer.token
