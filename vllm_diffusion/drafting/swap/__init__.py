"""Another draft for a running server, and the path of its endpoint."""

# The path is beneath /v1, where vLLM requires the API key.
PATH = "/v1/draft"
