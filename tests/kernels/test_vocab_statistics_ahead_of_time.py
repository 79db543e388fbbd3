"""The kernels of the vocabulary's statistics compile for every chip without spilling registers.

As ``test_ahead_of_time.py``, in a process without Triton's interpreter. By hand:

    PYTHONPATH=. python tests/kernels/test_vocab_statistics_ahead_of_time.py sm_90
"""

import json
import sys

import pytest
import torch

from tests.support.counters import baselines
from tests.support.counters.triton_compile import (
    COMPILED,
    SHARED_MEMORY,
    compile_for,
    empty,
    recorded,
    run_uninterpreted,
    variant,
)

ROWS, IDS = 256, 4096
# Logits as projected, their cap, whether anybody adjusts them.
LOGITS = [
    (torch.bfloat16, 30.0, False),
    (torch.bfloat16, 30.0, True),
    (torch.float32, None, True),
    (torch.float16, 30.0, False),
]
KERNELS = [
    "update",
    "plain update",
    "scaled",
    "largest",
    "count",
    "mass",
    "one mass",
    "narrow",
    "draw",
]


def row_logits(dtype, softcap, adjusted):
    from attention_kernels.vocab_statistics import LogitAdjustments, RowLogits

    adjustments = None
    if adjusted:
        index, words, counts = empty(ROWS), empty(4, IDS // 32), empty(4, IDS)
        listed, offsets = empty(4, 2048), empty(4, 2048, dtype=torch.float32)
        number = empty(4, dtype=torch.float32)
        lists, penalties = (index, listed, offsets, number), (index, number, number, number)
        adjustments = LogitAdjustments(*lists, *penalties, words, counts, index, words, index)
    return RowLogits(empty(ROWS, IDS, dtype=dtype), 4096, softcap, adjustments)


def kernels_of(logits):
    """Return the kernels to compile; the search is compiled once per type, without caps."""
    is_new = logits.adjustments is None or logits.projected.dtype == torch.float32
    return [name for name in KERNELS if is_new or name != "narrow"]


def recorded_launches(logits):
    """Return each kernel with its arguments, by name, for ``ROWS`` rows."""
    from attention_kernels.vocab_statistics.running import RowDraws, RunningStatistics
    from attention_kernels.vocab_statistics.search import Piece
    from attention_kernels.vocab_statistics.triton import kept_rows, narrow, update

    device = torch.device("meta")
    number, integer = empty(ROWS, dtype=torch.float32), empty(ROWS)
    keys = integer.long()
    draws = RowDraws(number, number, keys, integer, integer, integer)
    running = RunningStatistics.empty(ROWS, device)
    weights = empty(ROWS, IDS, dtype=logits.projected.dtype)
    product = empty(ROWS, 2816, dtype=torch.float32)
    pivots, bounds = keys[:, None].expand(ROWS, 16), keys[:, None].expand(ROWS, 2)
    calls = {
        "update": lambda: update.update_statistics(running, logits, draws, weights, product),
        "plain update": lambda: update.update_statistics(running, logits, draws, None, None),
        "scaled": lambda: kept_rows.scaled_logits(logits, number),
        "largest": lambda: kept_rows.largest_logit(logits, number),
        "count": lambda: kept_rows.weigh(logits, number, number, pivots, bounds, False),
        "mass": lambda: kept_rows.weigh(logits, number, number, pivots, bounds, True),
        "one mass": lambda: kept_rows.weigh(logits, number, number, keys[:, None], bounds, True),
        "narrow": lambda: narrow(Piece(bounds, pivots, keys), pivots, keys),
        "draw": lambda: kept_rows.draw(logits, number, number, keys, draws),
    }
    names = kernels_of(logits)
    with recorded() as launches:
        for name in names:
            calls[name]()
    return zip(names, launches, strict=True)


# Forty kernels for each; the attention kernels compile more often (``test_ahead_of_time.py``).
@pytest.mark.slow
@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_vocab_statistics_ahead_of_time(chip):
    """Every kernel compiles for a chip without spills, within its baselines."""
    lines = run_uninterpreted(__file__, chip)
    assert len(lines) == sum(len(kernels_of(row_logits(*case))) for case in LOGITS)
    for line in lines:
        assert line["spilled_bytes"] == 0, line
        assert line["shared_memory"] <= SHARED_MEMORY[chip], line
        if "update" in line["case"] and "False" in line["logits"]:
            # Four programs of 256 threads share the registers of a multiprocessor.
            assert line["registers"] <= 64, line
    found = {
        f"{line['case']}, {line['logits']}": {name: line[name] for name in COMPILED}
        for line in lines
    }
    triton = pytest.importorskip("triton")
    baselines.check(f"statistics, {chip}, Triton {triton.__version__}", found)


def test_no_number_of_rows_compiles_a_kernel_anew():
    """Launches for 1 row, multiples of 16 and other numbers share a compilation."""
    (variants,) = run_uninterpreted(__file__, "variants")
    assert len(variants) == sum(len(kernels_of(row_logits(*case))) for case in LOGITS)
    assert {name: len(found) for name, found in variants.items() if len(found) != 1} == {}


def variants_by_rows():
    """Return what Triton specializes each kernel on, in passes of several numbers of rows."""
    global ROWS
    found = {}
    for number in (256, 1, 16, 17, 100, 272):
        ROWS = number
        for case in LOGITS:
            for name, (kernel, args, kwargs) in recorded_launches(row_logits(*case)):
                found.setdefault(f"{name}, {case}", set()).add(variant(kernel, args, kwargs))
    return {name: sorted(variants) for name, variants in found.items()}


if __name__ == "__main__" and sys.argv[1] == "variants":
    print(json.dumps(variants_by_rows()))
elif __name__ == "__main__":
    for case in LOGITS:
        for name, launch in recorded_launches(row_logits(*case)):
            report = compile_for(sys.argv[1], *launch)
            print(json.dumps({"case": name, "logits": str(case)} | report), flush=True)
