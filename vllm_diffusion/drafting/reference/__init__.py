"""Definition of correct for drafts: a DFlash draft in plain PyTorch, and speculative decoding with it.

A *block* is an *anchor*, the last known token, which the target has not read, and masks behind it.
Its rows attend to each other in both directions, and to the target's hidden states of the positions
before the anchor through keys and values of the draft's own.
"""

from vllm_diffusion.drafting.reference.decoding import (
    Context,
    Generated,
    probabilities,
    propose,
    spec_generate,
    verify,
)
from vllm_diffusion.drafting.reference.draft import (
    ReferenceDraft,
    draft_config,
    load_draft,
    reach_of_layer,
    save_draft,
)

__all__ = [
    "Context",
    "Generated",
    "ReferenceDraft",
    "draft_config",
    "load_draft",
    "probabilities",
    "propose",
    "reach_of_layer",
    "save_draft",
    "spec_generate",
    "verify",
]
