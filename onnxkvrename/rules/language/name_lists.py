"""Parse names that a rule lists one by one, because no pattern describes them."""

from __future__ import annotations

from onnxkvrename.documents import ObjectReader
from onnxkvrename.rules.patterns import ListedName, NameTable, Pattern
from onnxkvrename.rules.profile import SIDES


def parse_names(table: ObjectReader) -> tuple[dict[str, Pattern], dict[str, str]]:
    """Return the names of each side, and the templates that write them with a token.

    Args:
        table: A [[kv]] rule with the key ``names``. The name of an output is without what follows
            a token in it, which is the row's ``suffix``.

    Raises:
        UnreadableTextError: A name or a part is listed twice, or an entry is not such a table.
    """
    entries: dict[str, dict[str, ListedName]] = {side: {} for side in SIDES}
    parts: set[tuple[str, int]] = set()
    for row in table.read_objects("names", "a list of { layer, buffer, input, output, suffix }"):
        part = row.read_string("buffer"), row.read_integer("layer", 0)
        if part in parts:
            raise row.build_error("buffer", "is listed twice for this layer")
        parts.add(part)
        for side in SIDES:
            name = row.read_string(side)
            suffix = row.read_string("suffix", "") if side == "output" else ""
            if not name or name + suffix in entries[side]:
                raise row.build_error(side, "is empty or listed twice")
            entries[side][name + suffix] = ListedName(name, suffix, *part)
        row.reject_unread_keys()
    tables: dict[str, Pattern] = {
        side: NameTable(names, tuple({entry.suffix for entry in names.values()}))
        for side, names in entries.items()
    }
    templates = {"input": "{name}[_{token}]", "output": "{name}[_{token}]{suffix}"}
    return tables, templates
