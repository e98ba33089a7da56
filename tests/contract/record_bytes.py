"""Add the rows of new cases to ``bytes.sha256``; no line that is there changes.

    python tests/contract/record_bytes.py

A new fixture has new cases (``bytes_cases.py``). A row whose feature goes is removed by hand, as
its case is. Rows of real exports that this machine lacks stay.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contract.bytes_cases import BYTES, list_absent, list_cases, read_rows, run_case, write_rows


def record_new_rows() -> None:
    """Run the cases that have no row yet, and write their rows."""
    rows = read_rows() if BYTES.is_file() else {}
    new = [case for case in list_cases() if case.name not in rows]
    for case in new:
        with tempfile.TemporaryDirectory() as directory:
            result = run_case(case, Path(directory).resolve())
        if result.not_restored:
            names = ", ".join(result.not_restored)
            raise SystemExit(f"{case.name}: strip does not restore {names}")
        rows[case.name] = result.lines
    write_rows(rows)
    for group in list_absent():
        print(f"left as it is, without ../shared/{group}: the rows of {group}")
    print(f"{len(new)} rows added, none changed")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(__doc__)
    else:
        record_new_rows()
