"""Rules from where they are kept: the built-in profiles, or a file of the user's."""

from __future__ import annotations

from pathlib import Path

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.rules.profile import Rules, parse
from onnxkvrename.storage import read as files

PROFILES = Path(__file__).parent / "profiles"


def load(profile: str = "qeff", path: Path | None = None) -> Rules:
    """A built-in profile, or the rules in a file.

    Raises :class:`RulesError` for what does not exist or cannot be used.
    """
    if path is not None:
        try:
            return parse(files.read_text(path), str(path))
        except ModelError as error:
            raise RulesError(error.message, path=error.path) from None
    known = profiles()
    if profile not in known:
        raise RulesError(
            f"no profile is called {profile}", hint=f"there are: {', '.join(sorted(known))}"
        )
    return parse(files.read_text(PROFILES / f"{profile}.toml"), profile)


def profiles() -> tuple[str, ...]:
    """The names of the built-in profiles."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.toml")))
