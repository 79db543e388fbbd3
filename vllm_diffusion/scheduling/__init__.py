"""What the engine schedules for block-diffusion models."""
