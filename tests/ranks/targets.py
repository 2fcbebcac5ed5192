"""What the rank processes of the tests run."""

import os
import signal
import time
from pathlib import Path


def exits(bootstrap: bytes) -> None:
    raise SystemExit(int(bootstrap))


def raises(bootstrap: bytes) -> None:
    raise RuntimeError(bootstrap.decode())


def waits(bootstrap: bytes) -> None:
    signal.pause()


def ignores_sigterm(bootstrap: bytes) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def reports(bootstrap: bytes) -> None:
    """Write what it finds about itself to the file named in the bootstrap."""
    lines = [
        ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        os.environ.get("OMP_NUM_THREADS", ""),
        os.environ.get("OF_RANK", ""),
        str(len(list(Path("/proc/self/task").iterdir()))),
    ]
    Path(bootstrap.decode()).write_text("\n".join(lines))


def computes_for_ever(bootstrap: bytes) -> None:
    """Never returns to the interpreter's signal checks for long: a lifeline must work here too."""
    while True:
        time.sleep(3600)


def measures_its_bootstrap(bootstrap: bytes) -> None:
    raise SystemExit(len(bootstrap) >> 16)


def counts_its_descriptors(bootstrap: bytes) -> None:
    """Exit code: how many it has beside standard input, output and error."""
    entries = list(Path("/proc/self/fd").iterdir())  # the listing's own is closed again when it is done
    raise SystemExit(len([entry for entry in entries if entry.is_symlink() and int(entry.name) > 2]))


def is_interrupted(bootstrap: bytes) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(3)
