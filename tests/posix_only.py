"""Names of the standard library that the tests use and that Windows lacks.

A test that uses some of it is skipped where it is missing (``conftest.py``), and
``without_posix/sitecustomize.py`` takes all of it away, to see on Linux that the rest works.
"""

from __future__ import annotations

MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
OS_NAMES = (
    *("chown", "copy_file_range", "fchmod", "fchown", "fork", "forkpty", "fstatvfs", "getegid"),
    *("geteuid", "getgid", "getxattr", "killpg", "lchown", "listxattr", "mkfifo"),
    *("mknod", "pread", "preadv", "pwrite", "pwritev", "register_at_fork", "removexattr"),
    *("sched_getaffinity", "sendfile", "setsid", "setxattr", "splice", "statvfs", "wait4"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_TMPFILE"),
)
SIGNAL_NAMES = (
    *("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "alarm", "pthread_sigmask", "setitimer"),
)
