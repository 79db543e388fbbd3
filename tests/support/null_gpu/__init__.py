"""A GPU that computes nothing: the CUDA path of torch, Triton and vLLM on a machine without a GPU.

The C++ sources stand for NVIDIA's libraries (``gpu.h`` says how), ``build.py`` compiles them,
``processes.py`` runs Python with them, and ``tests/null_gpu`` holds the tests. Nothing that runs
here says anything about values, about speed, or about whether a kernel is right.
"""
