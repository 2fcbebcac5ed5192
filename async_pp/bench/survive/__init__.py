"""`python -m async_pp.bench survive`: what becomes of open streams when ranks are lost, and how long it takes.

Our server as a process, streams through its HTTP API, and faults from outside. Two parts, each on a server of its own:

- *restarts* (`restarts`): one rank is killed under load, several times for each: from the kill to the end of the other
  ranks, to the next token, and until every stream has gone on, beside the cold starts of both servers.
- *random faults* (`random_faults`): for minutes a random rank gets a random fault (`faults`) while a number of streams
  is kept open (`streams`). The client writes down what it sent and how each request ended (`ledger`); afterwards the
  server must serve, hold no KV block, have kept its size, end by itself and leave nothing.

Greedy tokens are compared with those of an undisturbed run of the same prompt on the same server.

May live here: requests, faults from outside, what the kernel says about processes. May not: anything that asks the
engine by another way than its API, for the clients' view is what counts. The one exception is `worker`, which does in a
rank what no signal alone can.
"""
