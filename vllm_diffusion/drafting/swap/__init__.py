"""Another draft for a running server, and the path of its endpoint."""

# The path is beneath /v1, where vLLM requires the API key.
PATH = "/v1/draft"
# What may become of the draft that an update has replaced.
RESTORE, DROP = FATES = ("restore", "drop")
UNHARMED = "nothing was loaded, and the server serves what it served"
