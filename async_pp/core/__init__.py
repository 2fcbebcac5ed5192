"""Decisions without IO: which steps are in flight, when each settles, what a lost rank costs.

Everything here is plain synchronous code. It knows no asyncio, sockets, torch, vLLM, clock or randomness; time is an
argument. The same inputs give the same effects in the same order, so a run can be replayed from its events.
"""
