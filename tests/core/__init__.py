"""Tests of the core: plain calls, no loop, no processes, no clock."""
