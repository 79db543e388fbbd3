"""Compare ``cpu/kernels.py`` with vLLM's kernels, launch by launch."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch

from vllm_diffusion.cpu import cpu_platform_plugin

cpu_platform_plugin()

from vllm_diffusion.cpu import kernels as cpu_kernels  # noqa: E402
from vllm_diffusion.cpu import launches  # noqa: E402

KEPT: list[torch.Tensor] = []


def pointer_table(tensors: list[torch.Tensor]) -> torch.Tensor:
    KEPT.extend(tensors)
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def compare(name: str, grid: tuple[int, ...], ours: Any, make: Any, seed: int) -> None:
    """Launch both on equal arguments and compare every tensor that either may have written."""
    theirs_args, theirs_watched, constants = make(np.random.default_rng(seed))
    ours_args, ours_watched, _ = make(np.random.default_rng(seed))
    resolve_name(name)[grid](*theirs_args, **constants)
    ours[name](*ours_args, **constants)
    for expected, actual in zip(theirs_watched, ours_watched, strict=True):
        assert torch.equal(expected, actual), (name, seed, expected, actual)


def batch(rng: np.random.Generator, max_len: int = 40) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the slots of requests, the start of their rows, and the number of requests."""
    num_reqs = int(rng.integers(1, 5))
    slots = torch.from_numpy(rng.permutation(6)[:num_reqs].astype(np.int64))
    lens = rng.integers(1, max_len, num_reqs)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
    return slots, starts, num_reqs


def tables(rng: np.random.Generator) -> list[torch.Tensor]:
    return [
        torch.from_numpy(rng.integers(1, 90, (6, width)).astype(np.int32)) for width in (32, 48)
    ]


def gather(rng: np.random.Generator) -> Any:
    slots, _, num_reqs = batch(rng)
    sources = tables(rng)
    targets = [torch.zeros_like(t) for t in sources]
    counts = torch.from_numpy(rng.integers(0, 30, (2, 6)).astype(np.int32))
    computed = torch.from_numpy(rng.integers(0, 200, 6).astype(np.int32))
    args = (
        slots,
        pointer_table(sources),
        pointer_table(targets),
        torch.tensor([32, 48], dtype=torch.int64),
        counts,
        counts.stride(0),
        num_reqs,
        computed,
        torch.tensor([0, 23], dtype=torch.int32),
        torch.tensor([16, 16], dtype=torch.int32),
    )
    return args, targets, {"MASK_SLIDING_WINDOW": True, "BLOCK_SIZE": 64}


def slot_mappings(rng: np.random.Generator) -> Any:
    slots, starts, _ = batch(rng)
    total = int(starts[-1])
    out = torch.full((2, total + 9), 7, dtype=torch.int64)
    args = (
        out.shape[1],
        slots,
        starts,
        torch.from_numpy(rng.integers(0, 400, total).astype(np.int64)),
        pointer_table(tables(rng)),
        torch.tensor([32, 48], dtype=torch.int64),
        torch.tensor([16, 16], dtype=torch.int32),
        torch.tensor([True, True]),
        torch.tensor([False, False]),
        out,
        out.stride(0),
        0,
    )
    constants = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 64}
    return args, [out], constants


def prefill_inputs(rng: np.random.Generator) -> Any:
    slots, starts, _ = batch(rng)
    ids = torch.full((int(starts[-1]) + 3,), -7, dtype=torch.int32)
    ahead = torch.full((1, 6), -5, dtype=torch.int32)
    tokens = torch.from_numpy(rng.integers(0, 300, (6, 128)).astype(np.int32))
    args = (
        ids,
        ahead,
        ahead.stride(0),
        1,
        slots,
        starts,
        tokens,
        tokens.stride(0),
        torch.from_numpy(rng.integers(20, 60, 6).astype(np.int32)),
        torch.from_numpy(rng.integers(0, 60, 6).astype(np.int32)),
    )
    return args, [ids, ahead], {"BLOCK_SIZE": 64, "LOOKAHEAD_BLOCK": 1}


def positions(rng: np.random.Generator) -> Any:
    slots, starts, _ = batch(rng)
    pos = torch.full((int(starts[-1]) + 3,), -7, dtype=torch.int64)
    lens = torch.full((6,), -3, dtype=torch.int32)
    computed = torch.from_numpy(rng.integers(0, 60, 6).astype(np.int32))
    return (pos, lens, slots, starts, computed, 6), [pos, lens], {"BLOCK_SIZE": 64}


def combine(rng: np.random.Generator) -> Any:
    slots, starts, num_reqs = batch(rng)
    lens = (starts[1:] - starts[:-1]).numpy()
    bonus = int(rng.integers(0, 2))
    logits = np.array([rng.integers(bonus, n + 1) for n in lens])
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(logits)]).astype(np.int32))
    ids = torch.full((int(starts[-1]),), -7, dtype=torch.int32)
    out = torch.full((int(bounds[-1]),), -1, dtype=torch.int64)
    drafts = torch.from_numpy(rng.integers(0, 300, (6, 40)).astype(np.int64))
    seq_lens = torch.from_numpy((lens + rng.integers(0, 50, num_reqs)).astype(np.int32))
    args = (
        ids,
        slots,
        torch.from_numpy(rng.integers(0, 300, (6, 1)).astype(np.int64)),
        starts,
        seq_lens,
        torch.from_numpy(rng.integers(0, 50, 6).astype(np.int32)),
        drafts,
        drafts.stride(0),
        bounds,
        out,
    )
    return args, [ids, out], {"BLOCK_SIZE": 64, "NUM_NEW_SAMPLED_TOKENS": bonus}


def post_update(rng: np.random.Generator) -> Any:
    slots, starts, num_reqs = batch(rng)
    sampled = torch.from_numpy(rng.integers(0, 50, (num_reqs, 8)).astype(np.int32))
    counts = torch.from_numpy(rng.integers(0, 9, num_reqs).astype(np.int32))
    bins = torch.zeros(6, 50, dtype=torch.int32)
    computed = torch.from_numpy(rng.integers(0, 60, 6).astype(np.int32))
    last = torch.zeros(6, 1, dtype=torch.int64)
    all_ids = torch.zeros(6, 128, dtype=torch.int32)
    total = torch.from_numpy(rng.integers(0, 60, 6).astype(np.int32))
    args = (
        slots,
        computed,
        last,
        bins,
        bins.stride(0),
        sampled,
        sampled.stride(0),
        counts,
        torch.from_numpy(rng.integers(0, 9, num_reqs).astype(np.int32)),
        starts,
        all_ids,
        all_ids.stride(0),
        total,
        None,
        None,
        0,
    )
    return args, [computed, last, bins, all_ids, total], {}


def expand(rng: np.random.Generator) -> Any:
    slots, bounds, _ = batch(rng)
    requests = torch.full((int(bounds[-1]),), -1, dtype=torch.int64)
    local = torch.full((int(bounds[-1]),), -1, dtype=torch.int32)
    return (slots, requests, local, bounds), [requests, local], {"BLOCK_SIZE": 64}


def write(rng: np.random.Generator) -> Any:
    groups = bool(rng.integers(0, 2))
    outputs = [torch.zeros(6, 64, dtype=torch.int32) for _ in range(2)]
    lens = rng.integers(1, 9, 3)
    args = (
        pointer_table(outputs) if groups else outputs[0],
        torch.tensor([64, 64]) if groups else 64,
        torch.from_numpy(rng.permutation(6)[:3].astype(np.int32)),
        torch.from_numpy(rng.integers(0, 50, 3).astype(np.int32)),
        torch.from_numpy(rng.integers(1, 99, int(lens.sum())).astype(np.int32)),
        torch.from_numpy(np.cumsum(lens).astype(np.int32)),
        torch.from_numpy(rng.integers(0, 2, 3).astype(np.int32)) if groups else None,
    )
    return args, outputs, {"BLOCK_SIZE": 64, "MULTI_GROUP": groups}


def num_reqs_of(make: Any, seed: int) -> int:
    return batch(np.random.default_rng(seed))[2]


def main() -> None:
    cases = [
        ("block_table._gather_block_tables_kernel", gather, 2, 0),
        ("block_table._compute_slot_mappings_kernel", slot_mappings, 2, 1),
        ("input_batch._prepare_prefill_inputs_kernel", prefill_inputs, 0, 0),
        ("input_batch._prepare_pos_seq_lens_kernel", positions, 0, 1),
        ("input_batch._combine_sampled_and_draft_tokens_kernel", combine, 0, 0),
        ("input_batch._post_update_kernel", post_update, 0, 0),
        ("input_batch._expand_idx_mapping_kernel", expand, 0, 0),
        ("buffer_utils._apply_write_kernel", write, -1, 0),
    ]
    ours = launches.overrides(cpu_kernels.OVERRIDES)
    for name, make, groups, extra in cases:
        for seed in range(6):
            rows = num_reqs_of(make, seed) + extra
            grid = {2: (2, rows), 0: (rows,), -1: (3, 1)}[groups]
            compare("vllm.v1.worker.gpu." + name, grid, ours, make, seed)
    # The interpreted kernels above are what it puts others in the place of.
    import check_cpu_drafts

    print(f"{len(cases) + check_cpu_drafts.main()} kernels agree")


if __name__ == "__main__":
    main()
