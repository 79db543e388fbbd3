"""Counts that must not grow, and what compiled kernels need."""
