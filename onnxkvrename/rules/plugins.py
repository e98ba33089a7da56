"""Find plug-ins: objects that other distributions offer by entry points.

The name of an entry point is that of the plug-in, its value is ``module:ATTRIBUTE``::

    [project.entry-points."onnxkvrename.profiles"]
    mine = "my_package:PROFILE"

A plug-in with the name of something built-in is ignored. Several plug-ins with one name, and
plug-ins that cannot be loaded, are errors only when that name is loaded.
A distribution whose entry points cannot be read has no plug-ins.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import NamedTuple, TypeVar

from onnxkvrename.errors import KvRenameError
from onnxkvrename.limits import MAX_REASON_CHARS, shorten_text

T = TypeVar("T")


class Plugin(NamedTuple):
    """A name that at least one distribution offers in a group of entry points.

    There are several entry points if several distributions offer the name. Errors of the plug-in
    are of `error_type`.
    """

    group: str
    name: str
    entry_points: tuple[EntryPoint, ...]
    error_type: type[KvRenameError] = KvRenameError

    def load(self, expected_type: type[T]) -> T:
        """Import the plug-in and return its object.

        Raises:
            KvRenameError: Several plug-ins have this name, this one cannot be imported, or
                its object is not of `expected_type`. The error is of `error_type`.
        """
        if len(self.entry_points) > 1:
            raise self.error_type(
                f"{len(self.entry_points)} plug-ins of {self.group} are named {self.name}: "
                + " and ".join(sorted(map(_get_distribution_name, self.entry_points))),
                hint="uninstall all but one",
            )
        entry_point = self.entry_points[0]
        if not entry_point.pattern.match(entry_point.value):
            raise self.build_error(f"{entry_point.value!r} does not have the form module:ATTRIBUTE")
        loaded = self.call(entry_point.load)
        if not isinstance(loaded, expected_type):
            raise self.build_error(
                f"{entry_point.value} is of type {type(loaded).__name__}, "
                f"not {expected_type.__name__}"
            )
        return loaded

    def call(
        self, function: Callable[[], T], expected_errors: tuple[type[Exception], ...] = ()
    ) -> T:
        """Call a function of the plug-in, which can raise anything, or exit.

        The caller handles the `expected_errors`.

        Raises:
            KvRenameError: It raised something else. The error is of `error_type`.
            KeyboardInterrupt: The user interrupts the program.
        """
        try:
            return function()
        except expected_errors:
            raise
        except BaseException as error:
            if _is_interrupt(error):
                raise
            raise self.build_error(describe_exception(error)) from None

    def build_error(self, problem: str) -> KvRenameError:
        """Return the error for a plug-in that cannot be used; it names the distribution."""
        distribution = _get_distribution_name(self.entry_points[0])
        return self.error_type(
            f"the plug-in {self.name} of {distribution} ({self.group}) cannot be used: {problem}",
            hint=f"update or uninstall {distribution}",
        )


def find_plugins(
    group: str,
    builtin_names: Collection[str],
    error_type: type[KvRenameError] = KvRenameError,
) -> dict[str, Plugin]:
    """Return the plug-ins of a group by name, without loading any.

    Importing this module and calling this function take tens of milliseconds. A run that uses
    only built-in names should not spend them.

    Plug-ins cannot have `builtin_names`, in which ``-`` and ``_`` mean the same.
    """
    reserved = set(map(_normalize_name, builtin_names))
    by_name: dict[str, list[EntryPoint]] = {}
    for entry_point in _list_entry_points(group):
        if _normalize_name(entry_point.name) not in reserved:
            by_name.setdefault(entry_point.name, []).append(entry_point)
    return {
        name: Plugin(group, name, tuple(points), error_type) for name, points in by_name.items()
    }


def describe_exception(error: BaseException) -> str:
    """Return the type and the message of an exception on one line."""
    try:
        message = shorten_text(str(error), MAX_REASON_CHARS)
    except BaseException:  # a plug-in's exception cannot even be printed
        message = ""
    return " ".join(f"{type(error).__name__}: {message}".split()).rstrip(":")


def _is_interrupt(error: BaseException) -> bool:
    """Return whether the user interrupted, not a plug-in that raises KeyboardInterrupt.

    The command line's own handler raises it, so that the innermost frame is one of ours; with
    Python's handler the two look alike, and it counts as the user's.
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = traceback.tb_frame.f_globals.get("__name__", "") if traceback is not None else ""
    return str(module).startswith("onnxkvrename.")


def _list_entry_points(group: str) -> Iterator[EntryPoint]:
    """Yield the entry points of a group, without distributions that cannot be read.

    `importlib.metadata.entry_points` would raise the first error of any of them. As there,
    only the first distribution of each name on `sys.path` counts.
    """
    seen: set[str] = set()
    for distribution in _list_distributions():
        try:
            entry_points = tuple(distribution.entry_points)
            # Private, but what importlib.metadata uses: the public name has to parse METADATA.
            name = getattr(distribution, "_normalized_name", None)
        except Exception:  # whatever the files of any distribution hold
            continue
        if name is None or name not in seen:
            yield from (point for point in entry_points if point.group == group)
        if name is not None:
            seen.add(name)


def _list_distributions() -> Iterator[Distribution]:
    try:
        yield from distributions()
    except Exception:  # a finder of another distribution is broken
        return


def _normalize_name(name: str) -> str:
    return name.replace("_", "-")


def _get_distribution_name(entry_point: EntryPoint) -> str:
    try:
        name = entry_point.dist.name if entry_point.dist is not None else None
    except Exception:  # its metadata is broken
        name = None
    return name if isinstance(name, str) and name else "an unnamed distribution"
