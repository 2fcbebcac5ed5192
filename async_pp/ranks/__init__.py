"""Rank processes: how they are made, what they run, how their end is noticed."""
