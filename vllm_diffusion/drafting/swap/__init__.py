"""Another draft for a running server: the endpoint's path, and the states of a swap."""

# The path is beneath /v1, where vLLM requires the API key.
PATH = "/v1/draft"
PENDING, KEPT, ROLLED_BACK = "pending", "kept", "rolled back"
# What may become of the draft that an update has replaced.
RESTORE, DROP = FATES = ("restore", "drop")
UNHARMED = "nothing was loaded, and the server serves what it served"
