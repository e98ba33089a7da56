"""Parse names that a rule lists one by one, because no pattern describes them."""

from __future__ import annotations

from onnxkvrename.documents import ObjectReader
from onnxkvrename.rules.patterns import NameTable, Pattern
from onnxkvrename.rules.profile import SIDES


def parse_names(table: ObjectReader) -> tuple[dict[str, Pattern], dict[str, str]]:
    """Return the names of each side, and the templates that write them with a token.

    Args:
        table: A [[kv]] rule with the key ``names``, and ``suffix`` if the listed names of outputs
            are without the text that follows a token.

    Raises:
        UnreadableTextError: A name or a part is listed twice, or an entry is not such a table.
    """
    suffix = table.read_string("suffix", "")
    entries: dict[str, dict[str, tuple[str, int]]] = {side: {} for side in SIDES}
    parts: set[tuple[str, int]] = set()
    for row in table.read_objects("names", "a list of { layer, buffer, input, output }"):
        part = row.read_string("buffer"), row.read_integer("layer", 0)
        if part in parts:
            raise row.build_error("buffer", "is listed twice for this layer")
        parts.add(part)
        for side in SIDES:
            name = row.read_string(side)
            if not name or name in entries[side]:
                raise row.build_error(side, "is empty or listed twice")
            entries[side][name] = part
        row.reject_unread_keys()
    tables: dict[str, Pattern] = {
        "input": NameTable(entries["input"]),
        "output": NameTable(entries["output"], suffix),
    }
    templates = {"input": "{name}[_{token}]", "output": "{name}[_{token}]{suffix}"}
    return tables, templates
