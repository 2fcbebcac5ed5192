"""All gloo groups of a process on one loop: they work, and there is one thread for them."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from async_pp.ranks.gloo import share_one_loop

share_one_loop()
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
groups = [dist.new_group([0, 1], backend="gloo") for _ in range(4)] + [dist.new_group([rank_], backend="gloo") for rank_ in (0, 1)]
for group in groups[:4]:
    value = torch.tensor([rank + 1])
    dist.all_reduce(value, group=group)
    assert value.item() == 3, value
loops = [path for path in Path("/proc/self/task").glob("*/comm") if path.read_text().startswith("gloo_tcp_loop")]
dist.barrier()
dist.destroy_process_group()
print(len(loops))
"""


@pytest.mark.parametrize("interface, loops", [("lo", "1"), ("lo,lo", None)])
def test_groups_share_a_loop_unless_the_user_names_several_interfaces(tmp_path, interface, loops):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    if loops is None:
        assert all(int(count) > 1 for count in said)
    else:
        assert said == [loops, loops]
