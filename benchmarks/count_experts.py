"""How many experts of a layer the rows of a canvas choose: ``count_experts.py FOLDER ROWS``."""

from __future__ import annotations

import os
import sys
from typing import Any

# The engine runs in this process, where its routing can be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models.gemma4 import Gemma4Router

    folder, num_rows = sys.argv[1], int(sys.argv[2])
    counts: list[int] = []
    original = Gemma4Router.routing_function

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = original(self, *args, **kwargs)
        if ids.shape[0] == num_rows:
            counts.append(ids.unique().numel())
        return weights, ids

    Gemma4Router.routing_function = counting
    llm = LLM(
        folder,
        load_format="dummy",
        enforce_eager=True,
        max_num_seqs=1,
        max_model_len=4 * num_rows,
        limit_mm_per_prompt={"image": 0, "video": 0},
        additional_config={"diffusion": {"max_denoising_steps": 4}},
    )
    counts.clear()
    llm.generate(
        {"prompt_token_ids": [5] * 20},
        SamplingParams(max_tokens=num_rows, ignore_eos=True, seed=0),
        use_tqdm=False,
    )
    print(sum(counts) / len(counts))


if __name__ == "__main__":
    main()
