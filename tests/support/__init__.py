"""Code that several test files share."""
