"""Scheduling of block-diffusion models."""
