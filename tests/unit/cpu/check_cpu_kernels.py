"""Compare what prepares, samples, verifies and drafts on the CPU with vLLM's kernels, launch by
launch.

vLLM's launchers run on random batches. Each kernel is replaced by an object that launches both
implementations on the same arguments, and compares every bit of every tensor.
"""
# The interpreter is turned on before vLLM's kernels are imported.
# ruff: noqa: E402

import importlib
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_diffusion.cpu import cpu_platform_plugin

cpu_platform_plugin()

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

# Replaces buffers in pinned memory, which a CPU does not have.
from vllm.v1.worker.cpu import shm  # noqa: F401
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample import gumbel, logit_bias, logprob, prompt_logprob
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash

from vllm_diffusion.cpu import kernels as cpu_kernels
from vllm_diffusion.cpu import sampling_kernels as cpu_sampling
from vllm_diffusion.cpu.launches import overrides
from vllm_diffusion.drafting.cpu_kernels import draft_inputs as cpu_draft_inputs
from vllm_diffusion.drafting.cpu_kernels import verification as cpu_verification

FUNCTIONS = cpu_kernels.OVERRIDES | cpu_sampling.OVERRIDES
FUNCTIONS |= cpu_verification.OVERRIDES | cpu_draft_inputs.OVERRIDES
# The interpreter does not run them; test_sampling_kernels.py has other references.
NOT_INTERPRETED = ("topk_topp_triton._topk_topp_kernel", "logits._num_nans_kernel")
OVERRIDES = overrides(
    {name: each for name, each in FUNCTIONS.items() if not name.endswith(NOT_INTERPRETED)}
)
SLOTS, STEPS, MAX_LEN = 6, 4, 128

CPU = torch.device("cpu")

launches: Counter[str] = Counter()
# Tensors that a launch has pointers of.
pointed: list[torch.Tensor] = []


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Both:
    """Launches a kernel and, on what it had been given, our function."""

    def __init__(self, name: str, kernel: Any, ours: Callable[..., None]) -> None:
        self.name, self.kernel, self.ours = name, kernel, ours

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            tensors = [arg for arg in (*args, *pointed) if isinstance(arg, torch.Tensor)]
            given = [tensor.clone() for tensor in tensors]
            self.kernel[grid](*args, **constants)
            expected = [bits(tensor) for tensor in tensors]
            for tensor, before in zip(tensors, given, strict=True):
                tensor.copy_(before)
            self.ours(*args, **constants)
            launches[self.name] += 1
            for place, (tensor, theirs) in enumerate(zip(tensors, expected, strict=True)):
                assert bits(tensor) == theirs, (self.name, place, tensor)

        return launch


def log1p(x: Any) -> Any:
    """Replace the function that the interpreter lacks."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.dtype)


class Batch:
    """Requests in slots, each with rows of the target's pass."""

    def __init__(self, rng: np.random.Generator, *, num_drafts: bool) -> None:
        self.num_reqs = int(rng.integers(1, SLOTS))
        self.slots = torch.from_numpy(rng.permutation(SLOTS)[: self.num_reqs].astype(np.int64))
        drafts = rng.integers(0 if num_drafts else 1, STEPS + 1, self.num_reqs)
        counts = torch.from_numpy(drafts + 1)
        self.cu_num_logits = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        self.expanded = self.slots.repeat_interleave(counts)
        self.local = torch.cat([torch.arange(int(n)) for n in counts]).int()
        self.num_logits = int(counts.sum())


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, shape))


def some_temperatures(rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.choice([0.0, 0.7, 1.0, 1.9], SLOTS).astype(np.float32))


def some_logits(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    logits = torch.from_numpy(rng.normal(0, 3, shape).astype(np.float32))
    # As filters and the mask token leave them.
    logits[torch.from_numpy(rng.random(shape) < 0.2)] = float("-inf")
    logits[..., 1] = 0.5
    return logits


def verification(rng: np.random.Generator) -> None:
    batch = Batch(rng, num_drafts=True)
    vocab = int(rng.choice([5, 1500, 9000]))
    mode = rng.choice(["standard", "block", "synthetic"], p=[0.6, 0.2, 0.2])
    target = some_logits(rng, batch.num_logits, vocab)
    drawn_from = some_logits(rng, SLOTS, STEPS, vocab) if rng.random() < 0.4 else None
    drafts = integers(rng, 0, vocab, batch.num_logits).int()
    # What the target thinks of too, so that some are accepted; and some places without a draft.
    likely = target.argmax(dim=-1).roll(1).int()
    drafts = torch.where(torch.from_numpy(rng.random(batch.num_logits) < 0.6), likely, drafts)
    drafts[torch.from_numpy(rng.random(batch.num_logits) < 0.1)] = -1
    rejection_sampler_utils.rejection_sample(
        target,
        drawn_from,
        drafts,
        batch.cu_num_logits,
        integers(rng, 0, 2**33, batch.num_logits),
        batch.slots,
        batch.expanded,
        batch.local,
        some_temperatures(rng),
        integers(rng, -(2**62), 2**62, SLOTS),
        STEPS,
        torch.rand(STEPS) if mode == "synthetic" else None,
        use_fp64=bool(rng.integers(0, 2)),
        use_block_verification=mode == "block",
    )


def sampling(rng: np.random.Generator) -> None:
    rows, vocab = int(rng.integers(1, 9)), int(rng.choice([5, 1024, 2100]))
    logits = some_logits(rng, rows, vocab)
    keeps = rng.random() < 0.5
    # A request of a row that is not there is -1, and no two rows write the same place.
    places = torch.from_numpy(rng.permutation(SLOTS * STEPS)[:rows])
    slots = torch.where(torch.from_numpy(rng.random(rows) < 0.2), -1, places // STEPS)
    gumbel.gumbel_sample(
        logits,
        slots,
        some_temperatures(rng),
        integers(rng, -(2**62), 2**62, SLOTS),
        integers(rng, 0, 2**33, rows),
        apply_temperature=bool(rng.integers(0, 2)),
        is_drafting=bool(rng.integers(0, 2)),
        logits_cache=torch.zeros(SLOTS, STEPS, vocab) if keeps else None,
        logits_cache_col=(places % STEPS).int() if keeps else None,
        use_fp64=bool(rng.integers(0, 2)),
    )
    gumbel.apply_temperature(logits, slots.clamp(min=0), some_temperatures(rng))


def biases(rng: np.random.Generator) -> None:
    rows, vocab = int(rng.integers(1, 9)), int(rng.choice([30, 9000]))

    def listed() -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of tokens that each request lists, which may be 0, and the tokens."""
        counts = integers(rng, 0, 5, SLOTS) * integers(rng, 0, 2, SLOTS)
        tokens = np.stack([rng.permutation(vocab)[:8] for _ in range(SLOTS)])
        return counts.int(), torch.from_numpy(tokens.astype(np.int32))

    allowed, biased, stops = listed(), listed(), listed()
    slots, min_lens = integers(rng, 0, SLOTS, rows), integers(rng, 0, 20, SLOTS).int()
    # Everything that a request allows ends it, and it must not end yet.
    for theirs, ours in zip(allowed, stops, strict=True):
        theirs[slots[0]] = ours[slots[0]]
    min_lens[slots[0]] = 30
    logit_bias.apply_logit_bias(
        some_logits(rng, rows, vocab),
        slots,
        integers(rng, 0, 20, rows),
        *allowed,
        *biased,
        torch.from_numpy(rng.normal(0, 3, (SLOTS, 8)).astype(np.float32)),
        min_lens,
        stops[0],
        integers(rng, 0, 2, SLOTS).int(),
        stops[1],
        check_all_masked_rows=bool(rng.integers(0, 2)),
    )


def log_probabilities(rng: np.random.Generator) -> None:
    rows, vocab = int(rng.integers(1, 9)), int(rng.choice([30, 1500, 9000]))
    logits = some_logits(rng, rows, vocab)
    # Places where a model has failed.
    logits[torch.from_numpy(rng.random((rows, vocab)) < 0.01 * rng.integers(0, 2))] = float("nan")
    chosen = integers(rng, 0, vocab, rows)
    # The rank of a masked token counts what the kernel loads after the vocabulary, and ours does
    # not.
    where = torch.arange(rows), chosen
    logits[where] = torch.where(logits[where].isneginf(), 0.5, logits[where])
    logprob.compute_topk_scores(logits, int(rng.choice([0, 3, vocab])), chosen)
    # The interpreter compares bfloat16 as integers, so that its ranks are wrong.
    logprob.compute_token_logprobs(logits.bfloat16(), chosen[:, None])
    batch, _ = target_pass(rng)
    prompt_logprob.get_prompt_logprobs_token_ids(
        batch.num_tokens,
        batch.query_start_loc,
        batch.idx_mapping,
        integers(rng, 0, MAX_LEN - 20, SLOTS).int(),
        integers(rng, 0, 300, SLOTS, MAX_LEN).int(),
    )


def gathering(rng: np.random.Generator) -> None:
    batch = Batch(rng, num_drafts=True)
    rejection_sampler.gather_draft_sampled(
        integers(rng, 0, 90, 60).int(),
        integers(rng, 0, 90, 60),
        integers(rng, 0, 60, batch.num_logits),
        batch.expanded,
        batch.local,
        integers(rng, 0, 90, SLOTS).int(),
    )
    input_batch.get_num_sampled_and_rejected(
        integers(rng, 1, STEPS + 2, batch.num_reqs).int(),
        integers(rng, 1, 90, batch.num_reqs).int(),
        batch.cu_num_logits,
        batch.slots,
        integers(rng, 1, 90, SLOTS).int(),
    )


def target_pass(rng: np.random.Generator) -> tuple[Any, torch.Tensor]:
    """Return a batch as the runner has it, and the number of rejected rows of each request."""
    num_reqs = int(rng.integers(1, SLOTS))
    lens = rng.integers(1, 20, num_reqs)
    starts = np.concatenate([[0], np.cumsum(lens)])
    computed = rng.integers(0, MAX_LEN - 20, num_reqs)
    positions = np.concatenate([np.arange(n) + c for n, c in zip(lens, computed, strict=True)])
    batch = SimpleNamespace(
        num_reqs=num_reqs,
        num_tokens=int(starts[-1]),
        num_scheduled_tokens=lens.astype(np.int32),
        positions=torch.from_numpy(positions),
        input_ids=integers(rng, 0, 300, int(starts[-1])).int(),
        query_start_loc=torch.from_numpy(starts).int(),
        query_start_loc_np=starts.astype(np.int32),
        seq_lens=torch.from_numpy(computed + lens).int(),
        idx_mapping=torch.from_numpy(rng.permutation(SLOTS)[:num_reqs]),
    )
    rejected = torch.from_numpy(rng.integers(0, lens)).int()
    return batch, rejected


def buffers(max_tokens: int = 160) -> Any:
    return SimpleNamespace(
        input_ids=torch.full((max_tokens,), -7, dtype=torch.int32),
        positions=torch.full((max_tokens,), -7, dtype=torch.int64),
        is_padding=torch.zeros(max_tokens, dtype=torch.bool),
        query_start_loc=torch.full((SLOTS + 1,), -7, dtype=torch.int32),
        seq_lens=torch.full((SLOTS,), -7, dtype=torch.int32),
    )


def filled(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, -3, dtype=dtype)


def blocks_of_drafts(rng: np.random.Generator) -> None:
    batch, rejected = target_pass(rng)
    # Blocks that a window has left are block 0.
    table = integers(rng, 1, 90, SLOTS, 9).int()
    table[torch.from_numpy(rng.random((SLOTS, 9)) < 0.2)] = 0
    anchored = bool(rng.integers(0, 2))
    dflash.prepare_dflash_inputs(
        buffers(),
        *(filled(160) for _ in range(3)),
        *(filled(SLOTS * STEPS) for _ in range(3)),
        filled(SLOTS, dtype=torch.float32),
        filled(SLOTS),
        batch,
        integers(rng, 0, 2, batch.num_reqs).int(),
        rejected,
        integers(rng, 0, 300, SLOTS, 1),
        integers(rng, 0, 300, 1, SLOTS).int(),
        some_temperatures(rng),
        integers(rng, 0, 2**40, SLOTS),
        table,
        16,
        0,
        1,
        1,
        299,
        STEPS if anchored else STEPS + 1,
        STEPS,
        SLOTS,
        160,
        MAX_LEN,
        anchored,
    )


def tables_of_blocks(rng: np.random.Generator) -> None:
    batch, _ = target_pass(rng)
    tables = BlockTables([16, 16], SLOTS, 160, [32, 48], CPU, sliding_window_reach=[0, 23])
    pointed[:] = [*(each.gpu for each in tables.block_tables), *tables.input_block_tables]
    for slot in range(SLOTS):
        blocks = tuple(integers(rng, 1, 90, int(rng.integers(1, 30))).tolist() for _ in "ab")
        tables.append_block_ids(slot, blocks, overwrite=True)
    tables.apply_staged_writes()
    computed = integers(rng, 0, 200, SLOTS).int()
    tables.gather_block_tables(batch.idx_mapping, SLOTS, num_computed_tokens=computed)
    starts, num_tokens = batch.query_start_loc, batch.num_tokens
    tables.compute_slot_mappings(batch.idx_mapping, starts, batch.positions, num_tokens)
    pointed.clear()
    alone = StagedWriteTensor((SLOTS, 64), torch.int32, CPU)
    for slot in rng.permutation(SLOTS)[:3].tolist():
        written = integers(rng, 1, 99, int(rng.integers(1, 9))).tolist()
        alone.stage_write(slot, int(rng.integers(0, 50)), written)
    alone.apply_write()


def inputs_of_a_pass(rng: np.random.Generator) -> None:
    batch, _ = target_pass(rng)
    slots, starts = batch.idx_mapping, batch.query_start_loc
    prompt_lens, computed = integers(rng, 20, 60, SLOTS).int(), integers(rng, 0, 60, SLOTS).int()
    input_batch.prepare_prefill_inputs(
        filled(160, dtype=torch.int32),
        filled(1, SLOTS, dtype=torch.int32),
        slots,
        starts,
        integers(rng, 0, 300, SLOTS, MAX_LEN).int(),
        prompt_lens,
        computed,
    )
    seq_lens = filled(SLOTS, dtype=torch.int32)
    input_batch.prepare_pos_seq_lens(slots, starts, computed, filled(160), seq_lens)
    bonus = int(rng.integers(0, 2))
    counts = torch.tensor([int(rng.integers(bonus, n + 1)) for n in batch.num_scheduled_tokens])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    input_batch.combine_sampled_and_draft_tokens(
        batch.input_ids,
        slots,
        integers(rng, 0, 300, SLOTS, 1),
        starts,
        batch.seq_lens,
        prompt_lens,
        integers(rng, 0, 300, SLOTS, 40),
        bounds,
        int(bounds[-1]),
        bonus,
    )
    input_batch.expand_idx_mapping(slots, int(bounds[-1]), bounds, 64)
    input_batch.post_update(
        slots,
        computed,
        filled(SLOTS, 1),
        torch.zeros(SLOTS, 50, dtype=torch.int32),
        integers(rng, 0, 50, batch.num_reqs, 8).int(),
        integers(rng, 0, 9, batch.num_reqs).int(),
        integers(rng, 0, 9, batch.num_reqs).int(),
        starts,
        filled(SLOTS, MAX_LEN, dtype=torch.int32),
        integers(rng, 0, 60, SLOTS).int(),
    )


def main() -> None:
    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=log1p)
    for name, ours in OVERRIDES.items():
        module, _, attribute = name.rpartition(".")
        host = importlib.import_module(module)
        setattr(host, attribute, Both(name, getattr(host, attribute), ours))
    often = (verification, biases, log_probabilities)
    for case in (*often, sampling, gathering, blocks_of_drafts, tables_of_blocks, inputs_of_a_pass):
        for seed in range(16 if case in often else 6):
            with np.errstate(all="ignore"):
                case(np.random.default_rng(seed))
    assert set(launches) == set(OVERRIDES)
    print(f"{len(launches)} kernels agree")


if __name__ == "__main__":
    main()
