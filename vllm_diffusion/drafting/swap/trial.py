"""Where a server tells of a draft that took another one's place, and what it says became of it."""

# Beneath /v1, where vLLM asks for the key.
PATH = "/v1/draft"
PENDING, KEPT, ROLLED_BACK = "pending", "kept", "rolled back"
