"""Waiting for the former stage without a core.

vLLM's CPU ranks hand hidden states over through shared memory, and who waits for them spins: a stage that has nothing
to do yet takes its core away from the engine, the HTTP server and its clients. Here a stage first sleeps until the
former one says that it is about to hand over: a byte in a named pipe, one per step, in the order of the steps.

A rank that sleeps for a neighbour that is gone is ended by the engine like any other.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Handovers:
    """The announced handovers of one rank.

    Attributes:
        arrived_s: when the last wait for the former stage ended, in monotonic seconds.
    """

    def __init__(self) -> None:
        self.arrived_s = 0.0
        self._pipes: dict[tuple[int, int], int] = {}

    def close(self) -> None:
        """Close the pipes. May be called again."""
        while self._pipes:
            os.close(self._pipes.popitem()[1])

    def announce(self, group: Any, folder: Path) -> None:
        """Let the two ends of a pipeline group's shared-memory handovers announce and await them. CPU only.

        Args:
            group: vLLM's pipeline group of this rank.
            folder: a private folder that all ranks share.
        """
        communicator = group.device_communicator
        if group.world_size == 1 or not group.use_cpu_custom_send_recv:
            return
        send, receive = communicator.send_tensor_dict, communicator.recv_tensor_dict
        here, stages = group.rank_in_group, group.world_size

        def pipe(source: int, target: int) -> int:
            return self._pipe(folder, group.ranks[source], group.ranks[target])

        def announced_send(tensors: Any, dst: int) -> Any:
            os.write(pipe(here, dst), b"\0")
            return send(tensors, dst)

        def awaited_receive(src: int) -> Any:
            os.read(pipe(src, here), 1)
            self.arrived_s = time.monotonic()
            return receive(src)

        pipe(here, (here + 1) % stages)  # opened now: the folder's names may be taken away once all ranks are up
        pipe((here - 1) % stages, here)
        communicator.send_tensor_dict, communicator.recv_tensor_dict = announced_send, awaited_receive

    def _pipe(self, folder: Path, source: int, target: int) -> int:
        """The open pipe between two global ranks."""
        ends = source, target
        if ends not in self._pipes:
            path = folder / f"handover-{source}-{target}"
            with suppress(FileExistsError):  # the neighbour was first
                os.mkfifo(path, 0o600)
            self._pipes[ends] = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # both ways: opening waits for nobody
        return self._pipes[ends]
