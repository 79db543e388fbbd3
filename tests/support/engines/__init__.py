"""Engines and servers that tests start, and what is sent to them and read from them."""
