"""`python -m async_pp.bench simulate`: this engine on a virtual clock, for planning capacity.

Real: the planner, the pipeline machine, the settler, the policy, and vLLM's scheduler and KV cache manager behind their
seam. Simulated: the clock, the ranks, which answer when an oracle says (see `stages`), and the clients. So it answers
how many stages, what cohort size, what TTFT, for pipelines that no machine here has, as far as the given stage times
are those of the real one.

`settings` is what the command line imports; vLLM is imported by `simulation`, which puts the rest together.
"""

from async_pp.bench.simulate.settings import add_command

__all__ = ["add_command"]
