"""What answers are compared with: definitions and other implementations."""
