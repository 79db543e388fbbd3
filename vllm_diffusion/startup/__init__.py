"""What is refused before a model is loaded, and how the user is told."""
