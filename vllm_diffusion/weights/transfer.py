"""New weights for a server that runs, by vLLM's weight transfer: files instead of a GPU's links."""

# What --weight-transfer-config calls ours: plugin.py registers it.
WEIGHT_TRANSFER = "safetensors"
# What may become of the draft that an update of the draft has replaced.
RESTORE, DROP = FATES = ("restore", "drop")
