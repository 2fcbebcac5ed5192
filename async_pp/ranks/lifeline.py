"""A process that must not outlive another holds the read end of a pipe whose write end only the other one has.

The kernel sends SIGIO when the pipe hangs up, and SIGIO's default action ends the process: also in the middle of a
computation that never looks, and without a thread, which a process that forks must not have.
"""

import fcntl
import os
import select
import signal


def hold(fd: int) -> None:
    """End this process when the write end of the pipe `fd` is closed."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    hangup = select.poll()
    hangup.register(fd, select.POLLIN)
    if hangup.poll(0):  # it was closed before the kernel was asked to tell
        os._exit(1)
