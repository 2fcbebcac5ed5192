"""Bytes to values and back, without IO: messages, frames, the seal, the limits."""
