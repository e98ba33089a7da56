"""Run one command and print exit code, wall seconds, CPU seconds and peak RSS in KiB.

A process of its own, and a tiny one, because Linux counts what the parent held when it forked
into the child's peak: `python -I -S measure.py LOG COMMAND...` puts that floor at some 8 MB.
"""

import os
import sys
import time

log, *command = sys.argv[1:]
actions = [
    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
    (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
    (os.POSIX_SPAWN_DUP2, 1, 2),
]
start = time.perf_counter()
pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
_, status, usage = os.wait4(pid, 0)
wall = time.perf_counter() - start
code = os.waitstatus_to_exitcode(status)
print(code, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
