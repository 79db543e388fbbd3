"""Answers without a server: ``vllm.LLM`` on the shipped checkpoint.

python examples/offline.py
python examples/offline.py "Reverse the word stone."
"""

import logging
import os
import sys
import warnings

# Answers are printed, and not vLLM's log; the variable reaches the engine's process.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

from vllm import LLM, SamplingParams  # noqa: E402

from vllm_diffusion.checkpoints import shipped_checkpoint  # noqa: E402
from vllm_diffusion.metrics import request_metrics  # noqa: E402


def main() -> None:
    prompts = sys.argv[1:] or ["What is 7+8?", "What is 9+4?"]
    llm = LLM(str(shipped_checkpoint()), max_model_len=1024, max_num_seqs=4, use_tqdm_on_load=False)
    outputs = llm.chat(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        SamplingParams(max_tokens=128, seed=0),
        use_tqdm=False,
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        print(f"{prompt} -> {answer.text!r}")
        took = request_metrics(answer)
        if took is not None:
            steps = ", ".join(map(str, took.denoise_steps_per_canvas))
            print(f"  denoise steps of each canvas: {steps}; {took.passes} passes in all")


# vLLM starts its engine in a process that imports this file again.
if __name__ == "__main__":
    main()
