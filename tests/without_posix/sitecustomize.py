"""Make Python look as it does on Windows, as far as missing modules and functions go.

Python imports this module at its start if its directory is on ``PYTHONPATH``. The standard
library keeps what it has imported before; whatever is imported later has to do without.
"""

import asyncio  # noqa: F401
import concurrent.futures.process  # noqa: F401
import fcntl
import multiprocessing.shared_memory  # noqa: F401
import os
import platform
import shutil
import signal
import subprocess  # noqa: F401
import sys
import tempfile
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).resolve().parent.parent))

from posix_only import MODULES, OS_NAMES, SIGNAL_NAMES

msvcrt = ModuleType("msvcrt")
msvcrt.LK_NBLCK, msvcrt.LK_UNLCK = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN
msvcrt.locking = lambda descriptor, mode, size, flock=fcntl.flock: flock(descriptor, mode)
sys.modules["msvcrt"] = msvcrt

platform.platform()  # keeps its answer
shutil._USE_CP_SENDFILE = tempfile._O_TMPFILE_WORKS = False
sys.modules.update(dict.fromkeys(MODULES))  # to import one of them raises ImportError
for module, names in ((os, OS_NAMES), (signal, SIGNAL_NAMES)):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
