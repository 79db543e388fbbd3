"""PyTorch in place of runner kernels that dominate a step under Triton's interpreter."""


def register() -> None:
    """Register them through vLLM's dispatcher. Safe to call twice."""
