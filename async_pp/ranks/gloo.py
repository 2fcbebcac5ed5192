"""One event loop for all of a rank's gloo process groups.

vLLM makes a dozen gloo groups per rank, most of them of one member. PyTorch gives each a device of its own, and each
device a thread that wakes a hundred times a second: 1 to 2 % of a core for a rank that does nothing. Gloo's devices are
made to be shared.
"""

import datetime
import os
from typing import Any

from torch.distributed import distributed_c10d


def share_one_loop() -> None:
    """Let the process groups that this process makes from here on share one gloo device."""
    plain = distributed_c10d.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if "," in interface:  # several devices, by the user's wish
        return
    device = plain.create_device(interface=interface) if interface else plain.create_default_device()

    class SharedLoopGloo(plain):  # type: ignore[misc, valid-type]
        """A gloo group on the shared device; made with the same arguments as the plain one."""

        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
            options = plain._Options()  # noqa: SLF001 - PyTorch has no other name for them
            options._devices, options._timeout = [device], timeout  # noqa: SLF001
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedLoopGloo
