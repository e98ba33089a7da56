"""Find plug-ins: objects that other distributions offer by entry points.

The name of an entry point is that of the plug-in, its value is ``module:ATTRIBUTE``::

    [project.entry-points."onnxkvrename.profiles"]
    mine = "my_package:PROFILE"

A plug-in with the name of something built-in is ignored. Several plug-ins with one name, and
plug-ins that cannot be loaded, are errors only when that name is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.metadata import EntryPoint, distributions
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
        """
        try:
            return function()
        except KeyboardInterrupt:
            raise
        except expected_errors:
            raise
        except BaseException as error:
            text = shorten_text(f"{type(error).__name__}: {error}", MAX_REASON_CHARS)
            raise self.build_error(" ".join(text.split()).rstrip(":")) from None

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
    reserved = {name.replace("_", "-") for name in builtin_names}
    by_name: dict[str, dict[str, EntryPoint]] = {}
    for distribution in distributions():
        try:
            entry_points = distribution.entry_points.select(group=group)
        except Exception:  # a broken distribution of others hides no plug-in
            continue
        for point in entry_points:
            if point.name.replace("_", "-") not in reserved:
                # A distribution that is twice on the path offers the same value.
                by_name.setdefault(point.name, {}).setdefault(point.value, point)
    return {
        name: Plugin(group, name, tuple(points.values()), error_type)
        for name, points in by_name.items()
    }


def _get_distribution_name(entry_point: EntryPoint) -> str:
    try:
        name = entry_point.dist and entry_point.dist.metadata["Name"]
    except Exception:  # there is no metadata, or no name in it: finders raise errors of their own
        name = None
    return name or "an unnamed distribution"
