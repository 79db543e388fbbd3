"""Start-up: settings, checks and choices before a model is loaded."""
