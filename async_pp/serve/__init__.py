"""`python -m async_pp.serve`: vLLM's OpenAI-compatible API on an `AsyncPPEngine`, as a program.

    preflight   refuse what is plainly wrong, take the address        no vLLM, milliseconds
    program     environment, zygote, import, parse, run the loop      the order of a start
    flags       vllm serve's flags + "async-pp", light and real       catalogue, helptext: the same without vLLM
    application vLLM's routes on our engine                           the only module besides flags that knows vLLM
    lifecycle   start, serve, drain, stop, fail; exit codes           http, signals, display: its parts
    probes ── auth ── gate ── application                             the way of a request; asgi: what they share

This is the application layer: unlike the library below it may install signal handlers, choose the event loop, configure
logging and set environment variables.
"""
