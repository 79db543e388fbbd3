"""Name of the weight transfer that updates a running server from files."""

# Backend in --weight-transfer-config; plugin.py registers it.
WEIGHT_TRANSFER = "safetensors"
