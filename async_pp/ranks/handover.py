"""Waiting for the former stage without a core.

vLLM's CPU ranks hand hidden states over through shared memory, and who waits for them spins: a stage that has nothing
to do yet takes its core away from the engine, the HTTP server and its clients. Here a stage first sleeps until the
former one says that it is about to hand over: a byte in a named pipe, one per step, in the order of the steps.

A rank that sleeps for a neighbour that is gone is ended by the engine like any other.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def announce_handovers(group: Any, folder: Path) -> Callable[[], None]:
    """Let the two ends of a pipeline group's shared-memory handovers announce and await them. CPU only.

    Args:
        group: vLLM's pipeline group of this rank.
        folder: a private folder that all ranks share.

    Returns:
        What closes the pipes.
    """
    communicator = group.device_communicator
    if group.world_size == 1 or not group.use_cpu_custom_send_recv:
        return _nothing
    send, receive = communicator.send_tensor_dict, communicator.recv_tensor_dict
    pipes: dict[tuple[int, int], int] = {}

    def pipe(source: int, target: int) -> int:
        ends = group.ranks[source], group.ranks[target]
        if ends not in pipes:
            path = folder / f"handover-{ends[0]}-{ends[1]}"
            with suppress(FileExistsError):  # the neighbour was first
                os.mkfifo(path, 0o600)
            pipes[ends] = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # both ways: opening waits for nobody
        return pipes[ends]

    def announced_send(tensors: Any, dst: int) -> Any:
        os.write(pipe(group.rank_in_group, dst), b"\0")
        return send(tensors, dst)

    def awaited_receive(src: int) -> Any:
        os.read(pipe(src, group.rank_in_group), 1)
        return receive(src)

    def close() -> None:
        while pipes:
            os.close(pipes.popitem()[1])

    here, stages = group.rank_in_group, group.world_size
    pipe(here, (here + 1) % stages)  # opened now: the folder's names may be taken away once all ranks are up
    pipe((here - 1) % stages, here)
    communicator.send_tensor_dict, communicator.recv_tensor_dict = announced_send, awaited_receive
    return close


def _nothing() -> None:
    """No pipe was opened."""
