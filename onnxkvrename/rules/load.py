"""Rules from where they are kept: the built-in profiles, or a file of the user's."""

from __future__ import annotations

from pathlib import Path

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.rules.profile import Rules, parse_rules
from onnxkvrename.storage.read import read_text_file

PROFILES_DIRECTORY = Path(__file__).parent / "profiles"


def load_rules(profile: str = "qeff", path: Path | None = None) -> Rules:
    """A built-in profile, or the rules in a file.

    Raises :class:`RulesError` for what does not exist or cannot be used.
    """
    if path is not None:
        try:
            return parse_rules(read_text_file(path), str(path))
        except ModelError as error:
            raise RulesError(error.message, path=error.path) from None
    known = list_profiles()
    if profile not in known:
        raise RulesError(
            f"no profile is called {profile}", hint=f"there are: {', '.join(sorted(known))}"
        )
    return parse_rules(read_text_file(PROFILES_DIRECTORY / f"{profile}.toml"), profile)


def list_profiles() -> tuple[str, ...]:
    """The names of the built-in profiles."""
    return tuple(sorted(path.stem for path in PROFILES_DIRECTORY.glob("*.toml")))
