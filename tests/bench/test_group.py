"""A process group ends whole, with the shared memory that it had open."""

import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from async_pp.bench.group import end_group

FAMILY = """
import mmap, os, signal, subprocess, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 4096)
kept = mmap.mmap(fd, 4096)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "100"])
print(child.pid, flush=True)
signal.pause()
"""


def test_a_group_ends_whole_with_its_shared_memory():
    memory = Path(f"/dev/shm/{uuid.uuid4().hex}")
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(memory)], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        child = int(process.stdout.readline())
        assert memory.exists()
        end_group(process.pid)
        assert process.wait(5) == -9
    assert not memory.exists()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    end_group(process.pid)  # nothing is left to end
