"""Tiny checkpoints, adapters and drafts, and parts of models without an engine."""
