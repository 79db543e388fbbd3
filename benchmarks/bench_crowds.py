"""How long honest requests wait behind many constrained ones that nothing satisfies.

    python benchmarks/bench_crowds.py

Eight requests without a constraint come behind 200 others: legal ones without a constraint, and
hostile ones (empty languages, grammars at odds with bad words, long expressions, extreme
penalties). Random weights, which converge with neither; all take the same steps a canvas.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.checkpoints import random_checkpoint
from tests.support.crowds import CROWDED, HOSTILE, LEGAL, last_honest_answer
from tests.support.engine import TracedEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--asynchronous", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = TracedEngine(
            random_checkpoint(Path(folder)), async_scheduling=args.asynchronous, **CROWDED
        )
        try:
            # Twice, the first time for what is compiled and cached.
            for others in (LEGAL, HOSTILE):
                last_honest_answer(engine, others, len(HOSTILE))
            legal = last_honest_answer(engine, LEGAL, args.others)
            hostile = last_honest_answer(engine, HOSTILE, args.others)
        finally:
            engine.close()
    print("behind    steps  seconds")
    for name, last in (("legal", legal), ("hostile", hostile)):
        print(f"{name:8} {last.step:6} {last.seconds:8.1f}")
    print(f"ratio    {hostile.step / legal.step:6.2f} {hostile.seconds / legal.seconds:8.2f}")


if __name__ == "__main__":
    main()
