"""Train the tiny checkpoint further to copy long lists, for benchmarks/bench_predictions.py.

    tiny="$(vllm-diffusion checkpoint)" python examples/checkpoints/train_tiny_copier.py --init
    "$tiny" --out short --words 6 45 --growth 12 --minutes 22 python
    examples/checkpoints/train_tiny_copier.py --init short --out copier --words 44 95 --minutes 60

It is asked for a bullet list of words, some of them made up, and repeats hundreds of tokens of its
prompt. The shipped weights lose their place after some ten words. Other tasks are forgotten: these
weights are not shipped.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator

from tiny_model import build_tokenizer, save_checkpoint
from tiny_tasks import long_list
from tiny_training import add_arguments, begin, launch, optimise, tokenize
from tiny_training_forward import TrainingForward
from torch import Generator
from train_tiny_checkpoint import Batch, losses, make_batch
from transformers import DiffusionGemmaForBlockDiffusion

# Words of the shortest list.
LEAST = 6


def batches(args: argparse.Namespace, seed: int) -> Iterator[Batch]:
    """Lists of one length in each batch; the longest grows by a word every ``--growth`` batches.

    Half of the lengths are any, and half of them almost the longest.
    """
    tokenizer, rng = build_tokenizer(), random.Random(seed)
    generator = Generator("cpu").manual_seed(seed)
    first, last = args.words
    step = 0
    while True:
        longest = min(first + step // args.growth, last)
        num_words = rng.randint(LEAST if rng.random() < 0.5 else max(LEAST, longest - 8), longest)
        rows = [tokenize(tokenizer, long_list(rng, num_words)) for _ in range(args.batch_size)]
        yield make_batch(rows, args.canvases_per_row, generator)
        step += 1


def train(rank: int, args: argparse.Namespace) -> None:
    """Train in this process."""
    begin(rank, args)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(args.init)
    forward = TrainingForward(model)

    def of_seed(seed: int, _is_short: Callable[[], bool]) -> Iterator[Batch]:
        return batches(args, seed)

    optimise(
        rank,
        args,
        model,
        of_seed,
        # More canvases are mostly noise, as an answer's first steps are.
        lambda batch: losses(forward, batch, noise_exponent=0.6),
        lambda: save_checkpoint(model, args.out),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_arguments(parser)
    parser.set_defaults(batch_size=4, lr=1e-3, warm_up=20)
    parser.add_argument("--canvases-per-row", type=int, default=8)
    parser.add_argument(
        "--words", type=int, nargs=2, default=[6, 45], help="of the longest list, first and last"
    )
    parser.add_argument("--growth", type=int, default=5, help="batches for one more word")
    launch(train, parser.parse_args())


if __name__ == "__main__":
    main()
