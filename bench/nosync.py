"""onnxkvrename with fsync switched off: what is left is its own work, to set beside `cp`.

`python -I nosync.py SCRIPT ARGUMENT...`, where SCRIPT is the installed console script.
"""

import os
import sys


def _nothing(fd: object) -> None:
    """In place of fsync."""


os.fsync = os.fdatasync = _nothing
sys.argv = sys.argv[1:]
with open(sys.argv[0], encoding="utf-8") as script:
    code = compile(script.read(), sys.argv[0], "exec")
exec(code)
