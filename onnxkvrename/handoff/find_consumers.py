"""Find consumers by name: the modules of `consumers/`, and the plug-ins of other packages.

A plug-in is an entry point of the group ``onnxkvrename.consumers``. Its name is the consumer's,
its value is ``module:ATTRIBUTE`` of a `Consumer`::

    [project.entry-points."onnxkvrename.consumers"]
    pigeon-post = "pigeons.post:CONSUMER"

The name of a built-in consumer always means the built-in one.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import suggest_similar
from onnxkvrename.handoff import consumers
from onnxkvrename.handoff.consumer import Consumer

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEFAULT_CONSUMER = "vllm-qaic"
"""The consumer of a command that is given no ``--target``, however many there are."""
PLUGIN_GROUP = "onnxkvrename.consumers"


def list_consumers() -> tuple[str, ...]:
    """Return the names of all consumers in alphabetical order, without loading any."""
    return tuple(sorted({*_list_builtin(), *_find_plugins()}))


def load_consumer(name: str) -> Consumer:
    """Return the consumer of this name.

    Raises:
        KvRenameError: There is no such consumer, or the plug-in with this name is broken.
    """
    if name in _list_builtin():
        module = import_module(f"{consumers.__name__}.{name.replace('-', '_')}")
        consumer: Consumer = module.CONSUMER
        return consumer
    plugins = _find_plugins().get(name)
    if plugins is not None:
        return _load_plugin(name, plugins)
    known = list_consumers()
    hint = suggest_similar(name, known) or f"there are: {', '.join(known)}"
    raise KvRenameError(f"no target is called {name}", hint=hint)


def _list_builtin() -> frozenset[str]:
    return frozenset(module.name.replace("_", "-") for module in iter_modules(consumers.__path__))


def _find_plugins() -> dict[str, list[EntryPoint]]:
    """Return the entry points of each name, without those that a built-in consumer hides."""
    from importlib.metadata import entry_points  # 20 ms that a built-in consumer does not need

    plugins: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=PLUGIN_GROUP):
        if entry_point.name.replace("_", "-") not in _list_builtin():
            plugins.setdefault(entry_point.name, []).append(entry_point)
    return plugins


def _load_plugin(name: str, plugins: list[EntryPoint]) -> Consumer:
    plugin = plugins[0]
    owner = plugin.dist.name if plugin.dist is not None else plugin.value
    if len(plugins) > 1:
        owners = ", ".join(sorted(each.dist.name if each.dist else each.value for each in plugins))
        raise KvRenameError(
            f"{len(plugins)} plug-ins define the target {name}: {owners}",
            hint="uninstall all but one",
        )
    try:
        consumer = plugin.load()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(consumer, Consumer) and consumer.name == name:
            return consumer
        problem = (
            f"its consumer is named {consumer.name}"
            if isinstance(consumer, Consumer)
            else f"its value is of type {type(consumer).__name__}, not Consumer"
        )
    raise KvRenameError(
        f"cannot load the target {name} of the plug-in {owner} ({plugin.value}): {problem}",
        hint=f"update or uninstall {owner}",
    )
