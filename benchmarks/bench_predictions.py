"""How many passes a prediction saves (``prediction`` of a chat), by how the text is edited.

    python benchmarks/bench_predictions.py
    python benchmarks/bench_predictions.py --prompts 8 --asynchronous

Each prompt asks the shipped checkpoint for a bullet list of words, an answer of three or four canvases. Its prediction is
the list before an edit: the same, with another word, without a line, with its last line first, or of other words. The
shipped weights are tiny and cannot copy a long text, so the text to be edited is no part of the prompt. Passes are
those in which a request has rows; answers are right if they are the list that was asked for.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.metrics import request_metrics

WORDS = [
    "kite",
    "lemon",
    "stone",
    "lamp",
    "rose",
    "bird",
    "fish",
    "tree",
    "house",
    "chair",
    "cloud",
    "apple",
    "tiger",
    "bread",
    "table",
    "river",
    "boat",
    "ring",
    "snow",
    "door",
]
NUM_WORDS = 10
EDITS = ("no prediction", "nothing", "one word", "one line", "a line moved", "everything")
AT_ONCE = (1, 8)


def predicted(edit: str, words: list[str], rng: random.Random) -> list[str] | None:
    """The words of a list before an edit that makes it ``words``."""
    others = [word for word in WORDS if word not in words]
    place = rng.randrange(2, len(words) - 2)
    if edit == "one word":
        return [*words[:place], rng.choice(others), *words[place + 1 :]]
    if edit == "one line":
        return words[:place] + words[place + 1 :]
    if edit == "a line moved":
        return [words[-1], *words[:-1]]
    if edit == "everything":
        return rng.sample(others, len(others))
    return None if edit == "no prediction" else words


def text_of(words: list[str]) -> str:
    """A bullet list."""
    return "\n".join(f"- {word}" for word in words)


def main() -> None:
    """Serve each edit one request at a time and eight at once, and print a row for each."""
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default=str(shipped_checkpoint()))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--asynchronous", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    asked = [rng.sample(WORDS, NUM_WORDS) for _ in range(options.prompts)]
    chats: list[Any] = [
        [{"role": "user", "content": f"Make a bullet list: {', '.join(words)}."}] for words in asked
    ]
    print(
        "| the prediction differs by | at once | passes | steps of a canvas | accepted | rejected | right |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|")
    for at_once in AT_ONCE:
        llm = LLM(
            options.checkpoint,
            max_model_len=512,
            max_num_seqs=at_once,
            async_scheduling=options.asynchronous,
        )
        for edit in EDITS:
            rng = random.Random(edit)
            params = []
            for seed, words in enumerate(asked):
                before = predicted(edit, words, rng)
                own = {} if before is None else {"diffusion_prediction": text_of(before)}
                params.append(SamplingParams(max_tokens=160, seed=seed, extra_args=own))
            answers = [out.outputs[0] for out in llm.chat(chats, params, use_tqdm=False)]
            found = [request_metrics(answer) for answer in answers]
            steps = [count for one in found for count in one.denoise_steps_per_canvas]
            pairs = zip(answers, asked, strict=True)
            num_right = sum(answer.text == text_of(words) for answer, words in pairs)
            num = len(found)
            print(
                f"| {edit} | {at_once} | {sum(one.passes for one in found) / num:.2f} "
                f"| {sum(steps) / len(steps):.2f} "
                f"| {sum(one.accepted_prediction_tokens for one in found) / num:.1f} "
                f"| {sum(one.rejected_prediction_tokens for one in found) / num:.1f} "
                f"| {num_right} of {num} |",
                flush=True,
            )
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
