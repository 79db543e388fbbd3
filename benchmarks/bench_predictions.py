"""How many passes a prediction saves (``prediction`` of a chat), by how the text is edited.

    python benchmarks/bench_predictions.py
    python benchmarks/bench_predictions.py --words 40 80 --prompts 4 --checkpoint COPIER

Each prompt asks for a bullet list of words, which the prompt has; a word takes some seven tokens of
the answer. Its prediction is the list before an edit: the same, with another word, without a line,
with its last line first, or of other words. Passes are those in which a request has rows; answers
are right if they are the list that was asked for. The shipped weights copy some ten words. COPIER
is what ``examples/checkpoints/train_tiny_copier.py`` makes of them.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.metrics import request_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "checkpoints"))
from tiny_tasks import long_list

EDITS = ("no prediction", "nothing", "one word", "one line", "a line moved", "everything")
AT_ONCE = (1, 8)
# Of a word and its line, at most.
TOKENS_OF_A_WORD = 12


def predicted(edit: str, lines: list[str], rng: random.Random) -> str | None:
    """The lines of a list before an edit that makes it ``lines``."""
    place = rng.randrange(2, len(lines) - 2)
    if edit == "no prediction":
        return None
    if edit == "everything":
        return long_list(rng, len(lines)).answer
    if edit == "one word":
        other = next(line for line in long_list(rng, 2).answer.split("\n") if line not in lines)
        lines = [*lines[:place], other, *lines[place + 1 :]]
    elif edit == "one line":
        lines = lines[:place] + lines[place + 1 :]
    elif edit == "a line moved":
        lines = [lines[-1], *lines[:-1]]
    return "\n".join(lines)


def main() -> None:
    """Serve each edit one request at a time and eight at once, and print a row for each."""
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default=str(shipped_checkpoint()))
    parser.add_argument("--words", type=int, nargs="+", default=[10], help="of a list")
    parser.add_argument("--prompts", type=int, default=8, help="of each length")
    parser.add_argument("--asynchronous", action="store_true")
    options = parser.parse_args()
    asked = {
        num_words: [long_list(random.Random(seed), num_words) for seed in range(options.prompts)]
        for num_words in options.words
    }
    print(
        "| words | the prediction differs by | at once | passes | steps of a canvas | accepted "
        "| rejected | right |"
    )
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for at_once in AT_ONCE:
        llm = LLM(
            options.checkpoint,
            max_model_len=4096,
            max_num_seqs=at_once,
            async_scheduling=options.asynchronous,
        )
        for num_words, edit in ((n, edit) for n in asked for edit in EDITS):
            rng = random.Random(edit)
            lists = asked[num_words]
            chats: list[Any] = [[{"role": "user", "content": one.question}] for one in lists]
            params = []
            for seed, one in enumerate(lists):
                before = predicted(edit, one.answer.split("\n"), rng)
                own = {} if before is None else {"diffusion_prediction": before}
                most = TOKENS_OF_A_WORD * num_words
                params.append(SamplingParams(max_tokens=most, seed=seed, extra_args=own))
            answers = [out.outputs[0] for out in llm.chat(chats, params, use_tqdm=False)]
            found = [request_metrics(answer) for answer in answers]
            steps = [count for one in found for count in one.denoise_steps_per_canvas]
            pairs = zip(answers, lists, strict=True)
            num_right = sum(answer.text == one.answer for answer, one in pairs)
            num = len(found)
            print(
                f"| {num_words} | {edit} | {at_once} | {sum(one.passes for one in found) / num:.2f} "
                f"| {sum(steps) / len(steps):.2f} "
                f"| {sum(one.accepted_prediction_tokens for one in found) / num:.1f} "
                f"| {sum(one.rejected_prediction_tokens for one in found) / num:.1f} "
                f"| {num_right} of {num} |",
                flush=True,
            )
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
