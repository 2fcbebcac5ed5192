"""The one seam to vLLM: its configuration, its engine core, its scheduler, its errors.

Nothing outside this package (the client and the façade, which *are* vLLM classes, and the rank's runner apart) imports
vLLM in the engine. `version` refuses versions that were not tested, before anything else is touched.
"""
