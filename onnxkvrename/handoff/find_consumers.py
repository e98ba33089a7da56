"""Find consumers by name: the modules of `consumers/`, and the plug-ins of other packages.

A plug-in is an entry point of the group ``onnxkvrename.consumers``
(:mod:`onnxkvrename.rules.plugins`). Its value leads to a `Consumer` with its name::

    [project.entry-points."onnxkvrename.consumers"]
    pigeon-post = "pigeons.post:CONSUMER"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, suggest_similar
from onnxkvrename.handoff import consumers
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.layout.layout import Layout

if TYPE_CHECKING:
    from onnxkvrename.rules.plugins import Plugin

DEFAULT_CONSUMER = "vllm-qaic"
"""The consumer of a command without ``--target``."""
PLUGIN_GROUP = "onnxkvrename.consumers"
_EXPECTED_ERRORS: dict[str, tuple[type[Exception], ...]] = {
    "sort_key": (ValueError,),
    "configure": (KvRenameError,),
}
"""What a function of a consumer may raise, by its field."""


def list_consumers() -> tuple[str, ...]:
    """Return the names of all consumers in alphabetical order, without loading any."""
    return tuple(sorted({*_list_builtin(), *_find_plugins()}))


def list_rename_consumers() -> tuple[str, ...]:
    """Return the names of the consumers that a rename can serve, without those of broken plug-ins.

    To one with pages of its own names do not matter, and one with a configuration reads them there.
    """
    served = []
    for name in list_consumers():
        with suppress(KvRenameError):
            consumer = load_consumer(name)
            if consumer.configure is None and not consumer.is_paged:
                served.append(name)
    return tuple(served)


def load_consumer(name: str, list_known: Callable[[], Sequence[str]] = list_consumers) -> Consumer:
    """Return the consumer of this name; the error for another one suggests a known one.

    Raises:
        KvRenameError: There is no such consumer, or the plug-in with this name is broken.
    """
    if name in _list_builtin():
        module = import_module(f"{consumers.__name__}.{name.replace('-', '_')}")
        consumer: Consumer = module.CONSUMER
        return consumer
    plugin = _find_plugins().get(name)
    if plugin is not None:
        return _load_plugin(plugin)
    known = list_known()
    hint = suggest_similar(name, known) or f"targets: {', '.join(known)}"
    raise KvRenameError(f"no such target: {name}", hint=hint)


def find_connector_owners() -> Mapping[str, str]:
    """Return the connectors of vLLM with which consumers hand over, and the consumer of each."""
    owners: dict[str, str] = {}
    for name in list_consumers():
        with suppress(KvRenameError):
            for connector in load_consumer(name).connectors:
                owners.setdefault(connector, name)
    return owners


def configure_consumer(consumer: Consumer, layout: Layout) -> Consumer:
    """Return the consumer, with the configuration beside the models of a layout if it reads one.

    One with pages of its own is configured where a layout is checked: each side has another.

    Raises:
        KvRenameError: The configuration cannot be read or used.
    """
    if consumer.configure is None or consumer.is_paged:
        return consumer
    return consumer.configure(layout)


def choose_token(
    name: str, prefix: str | None, *, strip: bool, converts: bool = False
) -> str | None:
    """Return the token for a rename whose results a consumer will use.

    It is the consumer's own, or else `prefix` from the command line. With `strip` the rename
    removes it. One that `converts` names to those of another profile needs none.

    Raises:
        KvRenameError: There is no such consumer; it requires another token, or cannot take a
            renamed model; or the token is missing.
    """
    consumer = load_consumer(name, list_rename_consumers)
    if not consumer.token:
        needs_token = not (strip or (converts and prefix is None))
        return _choose_free_token(consumer, prefix, needs_token)
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


def _choose_free_token(consumer: Consumer, prefix: str | None, needs_token: bool) -> str | None:
    check = f"check them with `check-consumer --target {consumer.name}`"
    if consumer.is_paged:
        raise KvRenameError(
            f"nothing to rename for {consumer.name}: names of buffers do not matter to it",
            hint=f"leave the names as they are; {check}",
        )
    if consumer.refusal and needs_token:
        raise KvRenameError(
            f"{consumer.name} cannot take a renamed model: {consumer.refusal}",
            hint=f"leave the names as they are; {check}",
        )
    if consumer.configure is not None:
        raise KvRenameError(
            f"--target {consumer.name} cannot check a rename: it reads names from a file that the "
            "rename changes as well",
            hint=f"rename without --target, then {check}",
        )
    if prefix is None and needs_token:
        raise KvRenameError(
            f"--target {consumer.name} has no token of its own: it selects names without one",
            hint=f"pass --prefix TOKEN, or leave the names as they are and {check}",
        )
    return prefix


def _list_builtin() -> frozenset[str]:
    return frozenset(module.name.replace("_", "-") for module in iter_modules(consumers.__path__))


def _find_plugins() -> dict[str, Plugin]:
    from onnxkvrename.rules.plugins import find_plugins  # slow, not needed for a built-in consumer

    return find_plugins(PLUGIN_GROUP, _list_builtin())


def _load_plugin(plugin: Plugin) -> Consumer:
    consumer = plugin.load(Consumer)
    if consumer.name != plugin.name:
        raise plugin.build_error(f"its consumer is named {consumer.name}")
    return _guard_functions(consumer, plugin)


def _guard_functions(consumer: Consumer, plugin: Plugin) -> Consumer:
    """Return the consumer with functions that report their errors as errors of the plug-in."""

    def guard(field: str, function: Callable[..., Any]) -> Callable[..., Any]:
        expected = _EXPECTED_ERRORS.get(field, ())
        return lambda *arguments: plugin.call(partial(function, *arguments), expected)

    def guard_check(check: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
        return lambda view: iter(plugin.call(lambda: tuple(check(view))))

    fields = consumer._asdict()
    functions: dict[str, Any] = {f: guard(f, fields[f]) for f in fields if callable(fields[f])}
    if "configure" in functions:
        configure = functions["configure"]
        functions["configure"] = lambda layout: _guard_functions(configure(layout), plugin)
    return consumer._replace(checks=tuple(map(guard_check, consumer.checks)), **functions)
