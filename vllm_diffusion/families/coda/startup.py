"""CoDA: Dream's loop on a Qwen3, over the whole sequence in both directions.

Source: SalesforceAIResearch/CoDA at fa1d505, ``CoDALanguageModel``: ``generation_utils.py``, whose
``_sample`` is Dream's, and ``modeling_coda.py``. Defaults are those of its server and its README
(``serving/fast-api/app/core/config.py``): ``entropy`` with ``alg_temp`` 0.1 in 128 steps; those of
the function are ``origin`` in 512. It differs as Dream does (``dream/startup.py``), and in this:

- ``generation_config.json`` names an algorithm that the loop does not have ("original"), 10
  ``diffusion_steps`` and an ``alg_temp`` of 0.2. Nothing there reads them, and nothing here does.
- ``BLOCK_LENGTH`` of the server changes nothing there, and is no setting here.
- The server's ``confidence_threshold``, which it has from Fast-dLLM, is left out.
- Padding in a prompt is a token like others; the model ignores its attention mask there too.

The head is a matrix of its own, although ``tie_word_embeddings`` is true by default in the
publisher's class: with the versions of ``transformers`` that the publisher names (4.47 to 4.49) the
class ties nothing, neither when it trains nor when it saves. What ``config.json`` says is followed.
"""

from typing import Any

from transformers import Qwen3Config

from vllm_diffusion.decoding.layouts import ShiftedSequence
from vllm_diffusion.decoding.timed_reveal import TimedReveal
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.whole_sequences import WholeSequenceEngineConfig


class CoDAConfig(Qwen3Config):
    """Qwen3's, by another name."""

    model_type = "CoDA"

    def __init__(self, **fields: Any) -> None:
        """Take the fields of ``config.json``, which names no end token."""
        super().__init__(**({"eos_token_id": 151645} | fields))


class CoDAEngineConfig(WholeSequenceEngineConfig):
    """The entry of ``CoDALanguageModel``."""

    rules = {
        "timed_reveal": PublishedRule(
            TimedReveal,
            {"algorithm": "entropy", "eps": 1e-3, "alg_temp": 0.1, "max_denoising_steps": 128},
        )
    }
    generation_keys = {"eps": None, "alg_temp": None}
    body = "Qwen3ForCausalLM"
    mask_token_id = 151669
    block_length = 256
    layout = ShiftedSequence
    # Of its training (``pre-train``, ``block_size``); config.json names the positions of Qwen3.
    context_length = 8192
