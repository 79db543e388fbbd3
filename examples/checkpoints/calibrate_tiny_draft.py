"""Calibrate a draft on its server's own traffic, end to end, on a CPU.

    python examples/checkpoints/calibrate_tiny_draft.py --work calibrated

A draft of the shipped tiny Qwen3 is trained on other tasks than its server is then asked: it keeps
less than one proposal of a verification. The server records its traffic, `vllm-diffusion calibrate`
extracts hidden states and trains the draft, and a server with the new one is asked what was not
recorded. Fails unless that is below two tokens a verification before, and above five after, by the
servers' own counters.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from tiny_model import build_tokenizer
from tiny_qwen3 import load_target
from tiny_tasks import Example, draw_question, evaluation_set
from train_tiny_pair import answers, new_draft

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli.checkpoint import speculative_config
from vllm_diffusion.cli.client import openai_client, read_metrics, totals
from vllm_diffusion.cli.server import Server, vllm_serve
from vllm_diffusion.drafting.calibration.train import TrainSettings, train
from vllm_diffusion.drafting.recording import read_recording
from vllm_diffusion.drafting.reference import save_draft

# What the first draft is trained on, and what its server is asked.
FIRST_TASKS = {"prose": 1.0, "chat": 1.0}
TASKS = ("reverse", "upper", "json")
NUM_HELD_OUT = 8
NUM_AT_ONCE = 16
SIZES = ("one", "few", "few", "many")


def say(line: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {line}", flush=True)


def train_first_draft(target_folder: Path, out: Path, steps: int) -> None:
    """A draft that knows its target, and other tasks than those to come."""
    torch.manual_seed(0)
    target = load_target(target_folder)
    draft = new_draft(target, num_layers=3)
    train(
        draft,
        target.get_input_embeddings(),
        target.get_output_embeddings(),
        answers(target, build_tokenizer(), seed=0, weights=FIRST_TASKS),
        TrainSettings(steps=steps, learning_rate=3e-3, report_every=20),
        report=lambda progress: say(f"step {progress.step} of {steps}: {progress.loss:.2f} nats"),
    )
    save_draft(draft, out)


@contextmanager
def served(target: Path, draft: Path, recording: Path) -> Iterator[Server]:
    """A server of the pair that records."""
    settings = {"drafting": {"record": {"folder": str(recording), "max_mib": 16}}}
    command = vllm_serve(
        str(target),
        *("--served-model-name", "tiny", "--max-model-len", "1024", "--enforce-eager"),
        *("--max-num-seqs", str(NUM_AT_ONCE), "--speculative-config", speculative_config(draft)),
        *("--additional-config", json.dumps(settings)),
    )
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with Server(command, report=say, timeout=900, environment=environment) as server:
        yield server


def ask(server: Server, examples: Sequence[Example], *, record: bool) -> float:
    """Have all questions answered greedily; tokens a verification, by the server's counters."""
    client = openai_client(server.url, server.api_key)

    def answer(example: Example) -> None:
        client.chat.completions.create(
            model="tiny",
            messages=example.messages,
            max_tokens=192,
            temperature=0,
            extra_body={"vllm_xargs": {"record": record}},
        )

    before = totals(read_metrics(server.url))
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        list(pool.map(answer, examples))
    after = totals(read_metrics(server.url))
    verified, kept = (
        after[name] - before.get(name, 0.0)
        for name in (
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        )
    )
    return 1 + kept / verified


def traffic(num_requests: int) -> list[Example]:
    """Questions that are not among the held-out ones."""
    rng = random.Random(0)
    return [
        draw_question(rng, rng.choice(TASKS), rng.choice(SIZES), held_out=False)
        for _ in range(num_requests)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="a new folder for all of it")
    parser.add_argument("--first-steps", type=int, default=40, help="of the first draft's training")
    parser.add_argument("--num-requests", type=int, default=1000, help="that are recorded")
    parser.add_argument("--steps", type=int, default=400, help="of the calibration")
    parser.add_argument("--minutes", type=float, default=8, help="that the calibration may take")
    args = parser.parse_args()
    args.work.mkdir(parents=True)
    torch.set_num_threads(1)
    target = shipped_checkpoint("qwen3")
    first, second, recording = (args.work / name for name in ("first", "second", "recording"))
    held_out = [example for task in TASKS for example in evaluation_set(task, NUM_HELD_OUT)]

    say(f"training a draft on {', '.join(FIRST_TASKS)}")
    train_first_draft(target, first, args.first_steps)
    with served(target, first, recording) as server:
        before = ask(server, held_out, record=False)
        say(f"{before:.2f} tokens a verification of {', '.join(TASKS)}")
        ask(server, traffic(args.num_requests), record=True)
    say(f"{len(read_recording(recording).exchanges)} exchanges recorded")
    command = [sys.executable, "-m", "vllm_diffusion.cli.main", "calibrate", "train"]
    command += [str(target), str(recording), "--from", str(first), "--out", str(second)]
    command += ["--learning-rate", "3e-3", "--steps", str(args.steps)]
    subprocess.run([*command, "--minutes", str(args.minutes)], check=True)
    say("draft trained")
    with served(target, second, args.work / "recording2") as server:
        after = ask(server, held_out, record=False)
    say(f"{before:.2f} tokens a verification before, {after:.2f} after")
    if not before < 2 < 5 < after:
        sys.exit("It was to be below 2 before, and above 5 after.")


START = time.monotonic()

if __name__ == "__main__":
    main()
