"""Stand-ins for a server, a page, a GPU's graphs and copies."""
