"""Coroutines: plan, dispatch, await, settle, emit, and the seam to vLLM.

Only `vllm_seam`, `client` and `facade` know vLLM; planner, settler and executor see a scheduler through `ports`.
"""
