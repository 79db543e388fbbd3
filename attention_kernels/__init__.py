"""Attention kernels for block-diffusion language models: the mathematics, knows torch only."""
