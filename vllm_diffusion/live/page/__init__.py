"""The page of the live canvas: static files and one endpoint, in vLLM's own server."""
