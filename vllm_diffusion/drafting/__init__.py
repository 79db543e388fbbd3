"""Drafts: blocks that a small model proposes, and an autoregressive target verifies."""
