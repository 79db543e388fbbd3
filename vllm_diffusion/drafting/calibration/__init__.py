"""Drafts trained on hidden states of their own target."""
