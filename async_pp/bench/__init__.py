"""Measurements that anyone can repeat: `python -m async_pp.bench COMMAND`.

`serve` puts this server beside vLLM's own. `pipeline`, in a package of its own, puts the engine beside vLLM's and
beside what is possible, on ranks that sleep. What follows is about `serve`.

What makes the figures comparable: both systems run one after the other in one program on the same cores, with the same
model folder, the same engine flags, spelled out for both (see `systems`), and the same prompts, sent by vLLM's own load
generator (see `generator`). vLLM is unmodified but for the one fix without which it cannot serve a pipeline on CPUs
(see `peer_worker`). A failed request, or an answer shorter than asked, ends the bench: there is no figure of it.

May live here: starting servers as child processes, loading them through HTTP, reading what the kernel says about
them. May not: anything that reaches into a server, for the other one could not be measured in that way.
"""

from async_pp.errors import AsyncPPError


class BenchFailed(AsyncPPError):
    """A server or the load generator did not do what the measurement needs. The message ends with its last words."""
