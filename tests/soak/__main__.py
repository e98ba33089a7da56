"""Entry point of ``python -m tests.soak``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from soak.run import main

if __name__ == "__main__":
    sys.exit(main())
