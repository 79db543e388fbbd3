"""Serve diffusion LLMs with stock vLLM. The entry points are in ``plugin`` and ``platforms``."""
