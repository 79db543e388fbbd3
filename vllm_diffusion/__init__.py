"""Serve diffusion LLMs with stock vLLM. ``pyproject.toml`` lists the entry points."""
