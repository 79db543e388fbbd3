"""Teach the tiny SDAR to be brief where it knows nothing, by rewards for answers of a server that runs.

    python examples/rl/grpo.py
    python examples/rl/grpo.py --verify

Asked what it was never taught, the shipped checkpoint rambles. Each round asks a live ``vllm serve``
for several answers to each of some questions, by HTTP; rewards an answer for what it leaves of the
room it has; makes one step of policy gradient, an answer's advantage being its reward beside those of
the same question, in their standard deviations (GRPO with one step a round, so without ratios); and
sends the new weights to the server, which is never restarted. A block is written in one step, so
that the likelihood of an answer is exactly the product of its tokens' probabilities and the estimate
unbiased; with ``--steps`` above 1 the server reveals from left to right, and it still is.

``--verify`` starts a second server on each round's weights and compares seeded answers, token by token.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from recompute import Trace, sdar_logprobs
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoints"))

from tiny_sdar import load_model, save_checkpoint
from tiny_tasks import distinct_words

from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.cli.server import Server, vllm_serve
from vllm_diffusion.weights.trainer_engine import (
    SafetensorsTrainerEngine,
    SafetensorsTrainerInitInfo,
)

# With words in them, questions that the checkpoint was not trained on.
WORDINGS = (
    "Tell me about the {}.",
    "Why is the {} so {}?",
    "Where did the {} go?",
    "Do you like {} or {}?",
    "What would a {} say to a {}?",
)
MAX_TOKENS = 64
SERVE_OPTIONS = (
    *("--served-model-name", "tiny", "--max-model-len", "512", "--max-num-seqs", "64"),
    *("--enforce-eager", "--weight-transfer-config", '{"backend": "safetensors"}'),
)
# Sleeping, pausing and new weights are for whoever runs the server: vLLM's developers' mode.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Answer:
    """What the server said, and how."""

    prompt: list[int]
    tokens: list[int]
    trace: Trace
    reward: float


class Rollouts:
    """Answers of a live server."""

    def __init__(self, server: Server, steps: int) -> None:
        self._http = httpx.Client(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.api_key}"},
            timeout=600,
            trust_env=False,
        )
        # Which positions a step reveals is then no matter of what was drawn.
        self._how = {"diffusion_max_steps": steps, "diffusion_strategy": "sequential"}

    def ask(self, questions: list[str], num_answers: int, seed: int) -> list[list[Answer]]:
        """Some answers to each question, rewarded with the share of their room that they leave."""
        with ThreadPoolExecutor(16) as pool:
            seeds = range(seed, seed + len(questions))
            return list(pool.map(self._ask, questions, [num_answers] * len(questions), seeds))

    def _ask(self, question: str, num_answers: int, seed: int) -> list[Answer]:
        response = self._http.post(
            "/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": MAX_TOKENS,
                "temperature": 1.0,
                "n": num_answers,
                # The n answers take the seeds from here on.
                "seed": seed * num_answers,
                "return_token_ids": True,
                "vllm_xargs": self._how | {"diffusion_trace": True},
            },
        )
        response.raise_for_status()
        body = response.json()
        return [
            Answer(
                body["prompt_token_ids"],
                choice["token_ids"],
                choice["diffusion_trace"],
                1 - len(choice["token_ids"]) / MAX_TOKENS,
            )
            for choice in body["choices"]
        ]

    def post(self, path: str) -> None:
        """A command without a body."""
        self._http.post(path).raise_for_status()


def policy_loss(model: torch.nn.Module, groups: list[list[Answer]]) -> torch.Tensor | None:
    """Whose gradient raises the mean reward; ``None`` where each question's answers earn the same."""
    advantages, answers = [], []
    for group in groups:
        rewards = [answer.reward for answer in group]
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        if deviation > 0:
            answers += group
            advantages += [(reward - mean) / deviation for reward in rewards]
    if not answers:
        return None
    drawn = sdar_logprobs(model, [a.prompt for a in answers], [a.trace for a in answers])
    # What stands behind an answer's end did not earn its reward.
    length = torch.tensor([len(answer.tokens) for answer in answers])
    is_answer = drawn.place < length[drawn.answer]
    weighted = torch.tensor(advantages)[drawn.answer] * drawn.logprob
    return -weighted[is_answer].sum() / sum(len(group) for group in groups)


def mean_reward(groups: list[list[Answer]]) -> float:
    return statistics.fmean(answer.reward for group in groups for answer in group)


def draw_question(rng: random.Random) -> str:
    wording = rng.choice(WORDINGS)
    return wording.format(*distinct_words(rng, wording.count("{}")))


def started(checkpoint: Path) -> Server:
    """A server of the checkpoint; it runs while the block of a ``with`` does."""
    return Server(
        vllm_serve(str(checkpoint), *SERVE_OPTIONS),
        report=lambda line: None,
        timeout=900,
        environment=ENVIRONMENT,
    )


def check_against_fresh_server(
    model: torch.nn.Module, rollouts: Rollouts, held_out: list[str], steps: int
) -> int:
    """Compare seeded answers of the live server with those of one that was started on its weights.

    Returns:
        How many tokens were compared.

    Raises:
        AssertionError: If one differs.
    """
    asked = held_out[::5]
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, folder)
        with started(Path(folder)) as fresh:
            expected = Rollouts(fresh, steps).ask(asked, 2, seed=99)
    found = rollouts.ask(asked, 2, seed=99)
    tokens = [[a.tokens for group in groups for a in group] for groups in (found, expected)]
    assert tokens[0] == tokens[1], "the live server's answers are not those of its weights"
    return sum(len(one) for one in tokens[0])


def train(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Improve the shipped checkpoint, and yield what each round brought.

    The first and the last have ``held_out``, the mean reward on questions that are never trained on.
    """
    checkpoint = shipped_checkpoint("sdar")
    model = load_model(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0)
    rng = random.Random(args.seed)
    held_out = [draw_question(random.Random(f"held out {i}")) for i in range(40)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(checkpoint))
        rollouts = Rollouts(server, args.steps)
        sender = SafetensorsTrainerEngine.trainer_init(
            SafetensorsTrainerInitInfo(rank=0, folder=args.folder),
            client=HTTPVLLMWeightSyncClient(server.url),
            source=ModuleSource(model),
        )
        yield {"round": 0, "held_out": mean_reward(rollouts.ask(held_out, 2, seed=0))}
        for number in range(1, args.rounds + 1):
            begin = time.monotonic()
            questions: list[str] = []
            while len(questions) < args.questions:
                if (question := draw_question(rng)) not in held_out:
                    questions.append(question)
            groups = rollouts.ask(questions, args.answers, seed=1000 * number)
            asked = time.monotonic()
            loss = policy_loss(model, groups)
            if loss is not None:
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            stepped = time.monotonic()
            # Nothing is answered with half of an update, and the prefix cache forgets the old weights.
            rollouts.post("/pause?mode=wait")
            sender.send_weights(weight_version=str(number))
            rollouts.post("/resume")
            report = {
                "round": number,
                "reward": mean_reward(groups),
                "rollout_s": asked - begin,
                "gradient_s": stepped - asked,
                "update_s": time.monotonic() - stepped,
            }
            if args.verify:
                report["compared"] = check_against_fresh_server(
                    model, rollouts, held_out, args.steps
                )
            if number == args.rounds:
                report["held_out"] = mean_reward(rollouts.ask(held_out, 2, seed=0))
            yield report
    if args.out is not None:
        save_checkpoint(model, args.out)


def main() -> None:
    # Matrices this small gain nothing from more, and the server runs beside it.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="weight updates (%(default)s)")
    parser.add_argument("--questions", type=int, default=16, help="of a round (%(default)s)")
    parser.add_argument("--answers", type=int, default=8, help="to a question (%(default)s)")
    parser.add_argument("--steps", type=int, default=1, help="to write a block (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-4, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--folder", default="/dev/shm", help="weights pass through (%(default)s)")
    parser.add_argument(
        "--verify", action="store_true", help="compare with a server on each weights"
    )
    parser.add_argument("--out", type=Path, help="folder for the improved checkpoint")
    for report in train(parser.parse_args()):
        print("  ".join(f"{name} {value:.4g}" for name, value in report.items()), flush=True)


if __name__ == "__main__":
    main()
