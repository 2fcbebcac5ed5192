"""Announced handovers: the receiver's shared-memory receive begins when the sender has said so, step by step."""

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_pp.ranks.handover import Handovers


@dataclass
class Communicator:
    """Counts what passes; receiving what was not sent is what a spinning receiver would do."""

    box: list[Any] = field(default_factory=list)
    too_early: int = 0

    def send_tensor_dict(self, tensors: Any, dst: int) -> None:
        self.box.append((tensors, dst))

    def recv_tensor_dict(self, src: int) -> Any:
        if not self.box:
            self.too_early += 1
        return src, self.box.pop(0) if self.box else None


def group(rank: int, world: int = 2, custom: bool = True, ranks: tuple[int, ...] = (4, 5, 6)) -> Any:
    return SimpleNamespace(
        world_size=world,
        rank_in_group=rank,
        ranks=ranks[:world],
        use_cpu_custom_send_recv=custom,
        device_communicator=Communicator(),
    )


def announced(group: Any, folder: Path) -> Handovers:
    handovers = Handovers()
    handovers.announce(group, folder)
    return handovers


def test_a_receive_waits_until_the_neighbour_announces(tmp_path: Path) -> None:
    first, second = group(0), group(1)
    second.device_communicator.box = first.device_communicator.box  # the shared memory
    ends = [announced(end, tmp_path) for end in (second, first)]
    got: list[Any] = []
    received = threading.Event()

    def receive() -> None:
        for _ in range(100):
            got.append(second.device_communicator.recv_tensor_dict(0))
            received.set()

    # The pipe's byte is written before the shared memory is: a real receive would spin for that moment only.
    first.device_communicator.box.append("ahead of the announcement")
    receiver = threading.Thread(target=receive)
    receiver.start()
    assert not received.wait(0.05), "it sleeps: nothing was announced"
    announced_s = time.monotonic()
    for step in range(100):
        first.device_communicator.send_tensor_dict(step, 1)
    receiver.join()
    assert len(got) == 100
    assert second.device_communicator.too_early == 0
    assert announced_s <= ends[0].arrived_s <= time.monotonic()
    for end in ends:
        end.close()


def test_pipes_are_named_after_global_ranks_and_private(tmp_path: Path) -> None:
    middle = group(1, world=3)
    handovers = announced(middle, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"handover-4-5", "handover-5-6"}
    middle.device_communicator.send_tensor_dict("x", 2)
    path = tmp_path / "handover-5-6"
    assert path.is_fifo()
    assert path.stat().st_mode & 0o777 == 0o600
    before = len(os.listdir("/proc/self/fd"))
    handovers.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


@pytest.mark.parametrize(
    "untouched", [group(0, world=1), group(0, custom=False)], ids=["one stage", "no shared memory"]
)
def test_other_groups_are_left_alone(tmp_path: Path, untouched: Any) -> None:
    handovers = announced(untouched, tmp_path)
    assert untouched.device_communicator.send_tensor_dict.__func__ is Communicator.send_tensor_dict
    handovers.close()
    assert not list(tmp_path.iterdir())
