"""Name of the weight transfer that updates a running server from files."""

# Backend in --weight-transfer-config; plugin.py registers it.
WEIGHT_TRANSFER = "safetensors"
# What may become of the draft that an update of the draft has replaced.
RESTORE, DROP = FATES = ("restore", "drop")
