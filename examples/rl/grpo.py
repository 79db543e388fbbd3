"""Teach the tiny SDAR to be brief where it knows nothing, by rewards for answers of a server that
runs.

    python examples/rl/grpo.py

Each round asks a live ``vllm serve`` for several answers to each of some questions; rewards an
answer for what it leaves of the room it has; makes one step of policy gradient, an answer's
advantage being its reward beside those of the same question (GRPO with one step a round, so without
ratios); writes the new weights to a folder, and has the server read it, which is never restarted. A
block is written in one step, so that the likelihood of an answer is exactly the product of its
tokens' probabilities and the estimate unbiased.
"""

import argparse
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from recompute import Trace, sdar_logprobs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoints"))

from tiny_sdar import load_model, save_checkpoint
from tiny_tasks import distinct_words

from vllm_diffusion.checkpoints import shipped_checkpoint

# With words in them, questions that the checkpoint was not trained on.
WORDINGS = ("Tell me about the {}.", "Why is the {} so {}?", "Do you like {} or {}?")
MAX_TOKENS = 64
SERVE_OPTIONS = ("--served-model-name", "tiny", "--max-model-len", "512", "--enforce-eager")
# Which positions a step reveals is then no matter of what was drawn.
HOW = {"diffusion_max_steps": 1, "diffusion_strategy": "sequential", "diffusion_trace": True}
# Pausing and new weights are for whoever runs the server: vLLM's developers' mode.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Answer:
    """What the server said, and how."""

    prompt: list[int]
    tokens: list[int]
    trace: Trace
    reward: float


@contextmanager
def served(checkpoint: Path, log: Path) -> Iterator[httpx.Client]:
    """Serve a checkpoint until the block ends, which has a client of the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
    key = secrets.token_urlsafe()
    with (
        log.open("w") as said,
        subprocess.Popen(
            [*command, *SERVE_OPTIONS],
            env={**os.environ, **ENVIRONMENT, "VLLM_API_KEY": key},
            stdout=said,
            stderr=subprocess.STDOUT,
        ) as process,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=600,
            trust_env=False,
        ) as client,
    ):
        try:
            while True:
                with suppress(httpx.TransportError):
                    client.get("/health").raise_for_status()
                    break
                if process.poll() is not None:
                    sys.exit(f"The server did not start:\n{log.read_text()[-2000:]}")
                time.sleep(1)
            yield client
        finally:
            process.terminate()


def ask(server: httpx.Client, question: str, num_answers: int, seed: int) -> list[Answer]:
    """Some answers to a question, rewarded with the share of their room that they leave."""
    response = server.post(
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
            "vllm_xargs": HOW,
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


def send(server: httpx.Client, model: torch.nn.Module, folder: Path) -> None:
    """Have the server go on with the weights of the model."""
    save_checkpoint(model, folder)
    # No answer mixes old and new weights, and the prefix cache forgets the old ones.
    server.post("/pause?mode=wait").raise_for_status()
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    server.post("/collective_rpc", json=body).raise_for_status()
    server.post("/resume").raise_for_status()


def policy_loss(model: torch.nn.Module, groups: list[list[Answer]]) -> torch.Tensor:
    """Whose gradient raises the mean reward."""
    answers = [answer for group in groups for answer in group]
    advantages = []
    for group in groups:
        rewards = [answer.reward for answer in group]
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        advantages += [(reward - mean) / (deviation or 1.0) for reward in rewards]
    drawn = sdar_logprobs(model, [a.prompt for a in answers], [a.trace for a in answers])
    # What stands behind an answer's end did not earn its reward.
    length = torch.tensor([len(answer.tokens) for answer in answers])
    is_answer = drawn.place < length[drawn.answer]
    weighted = torch.tensor(advantages)[drawn.answer] * drawn.logprob
    return -weighted[is_answer].sum() / len(answers)


def train(server: httpx.Client, model: torch.nn.Module, folder: Path, rounds: int) -> None:
    """Print the mean reward of each round, whose answers are those of the round before's
    weights.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0)
    rng = random.Random(0)
    for number in range(1, rounds + 1):
        wordings = rng.choices(WORDINGS, k=16)
        questions = [one.format(*distinct_words(rng, one.count("{}"))) for one in wordings]
        seeds = range(1000 * number, 1000 * number + len(questions))
        with ThreadPoolExecutor(16) as pool:
            groups = list(pool.map(lambda q, seed: ask(server, q, 8, seed), questions, seeds))
        optimizer.zero_grad()
        policy_loss(model, groups).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # A folder of its own: a server that is started again finds whole weights.
        send(server, model, folder / str(number))
        reward = statistics.fmean(answer.reward for group in groups for answer in group)
        print(f"round {number}  reward {reward:.3f}", flush=True)


def main() -> None:
    # Matrices this small gain nothing from more, and the server runs beside it.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="weight updates (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for each round's weights")
    args = parser.parse_args()
    checkpoint = shipped_checkpoint("sdar")
    with (
        tempfile.TemporaryDirectory() as folder,
        served(checkpoint, Path(folder) / "server.log") as client,
    ):
        train(client, load_model(checkpoint), Path(args.out or folder).absolute(), args.rounds)


if __name__ == "__main__":
    main()
