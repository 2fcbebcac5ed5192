"""`python -m async_pp.bench pipeline`: pipelines of sleeping ranks, beside what is possible.

Ranks that sleep instead of computing, so any depth runs on few cores. A stage of a step begins when its former stage
has ended and lasts a time that is computed from the step's sequences and tokens. So what a perfect pipeline could do is
known, and all that is missing is the engine's. Four answers per load:

- ours and vLLM, both with the same worker class (`worker`), limits, requests and client code (`engines`);
- the *bare pipe* (`bare`): even cohorts, decided beforehand, through our rank processes without any scheduler: what
  this machine can give, with its sleep overshoot and hops;
- the *formula* (`oracle`): the same cohorts without processes and overheads.

May live here: requests, the clock, the worker, the order of a run. May not: anything that reaches into an engine beyond
`generate` and `collective_rpc`, for it could not be asked of both.
"""
