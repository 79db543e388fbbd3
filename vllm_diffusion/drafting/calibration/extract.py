"""Extraction of the target's hidden states at recorded tokens, by a replay through vLLM.

The engine is the target's with ``method: extract_hidden_states``: it reads each sequence once, as a
prompt, and keeps the outputs of the layers that the draft reads. They are those that the draft will
see when it is served: the same engine and its numerics, and the same KV cache if that is requested.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from vllm_diffusion.cli.console import say
from vllm_diffusion.drafting.calibration.samples import sample_name
from vllm_diffusion.drafting.recording import Exchange

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

# Subfolder of the output folder that the engine writes to.
_STAGING = ".staging"
# Bytes of hidden states that may be staged at a time, in addition to the written ones.
_BATCH_BYTES = 256 * 2**20
# Types of KV cache that publishers or many servers run targets with: with others the outputs of
# layers would not be the target's. Hidden states themselves are kept unquantised with each.
_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
# Why exchanges are left out, in the command's words.
_REPEATED, _TOO_LONG, _NO_ROOM = "repeat another", "are too long", "have no room (--disk-gib)"


def extract(
    target: Sequence[str],
    exchanges: Sequence[Exchange],
    target_layer_ids: Sequence[int],
    out: Path,
    max_bytes: int,
    max_length: int,
) -> None:
    """Write a sample for each exchange, the newest first, until there is no room.

    The engine runs in a process of its own, which this one ends; its files are read with vLLM's
    ``load_hidden_states``. Progress, and what is left out, are printed.

    Args:
        target: The model, and options of vLLM for it, without a draft. ``enforce_eager`` and no
            prefix cache are set.
        exchanges: Exchanges to replay, oldest first.
        target_layer_ids: Layers whose outputs the draft reads, as its ``config.json`` has them.
        out: A folder that is not there yet.
        max_bytes: Limit for all hidden states.
        max_length: Tokens of a sequence; the end of a longer one is left out.

    Raises:
        ValueError: Before weights are loaded, naming the option or the field and the remedy; and
            after that if the engine gave something else than was requested.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-diffusion calibrate train"))
    engine_args = EngineArgs.from_cli_args(parser.parse_args(["--model", *target]))
    # This comes first: vLLM's refusal would name the extraction's method, which the user did not
    # set.
    if engine_args.create_model_config().is_diffusion:
        raise ValueError(
            f"{engine_args.model} is a diffusion model, and drafts are for autoregressive targets; name the target "
            "whose traffic was recorded."
        )
    # This comes before the platform's check, whose message is about serving.
    _check_cache(engine_args.kv_cache_dtype)
    engine_args = _extracting(engine_args, target_layer_ids, out / _STAGING)
    config: VllmConfig = engine_args.create_engine_config()
    _check(config, target_layer_ids)
    hidden_size = config.model_config.get_hidden_size()
    vocab_size = config.model_config.get_vocab_size()
    longest = min(max_length, config.model_config.max_model_len - 1)
    bytes_a_token = len(target_layer_ids) * hidden_size * config.model_config.dtype.itemsize
    chosen, num_cut, left_out = _choose(exchanges, longest, max_bytes // bytes_a_token)
    for exchange in chosen:
        if max(exchange.token_ids) >= vocab_size:
            raise ValueError(
                f"The recording has token {max(exchange.token_ids)}, outside the target's vocabulary of "
                f"{vocab_size}; give the target whose traffic was recorded, or another recording."
            )
    if not chosen:
        raise ValueError(
            f"None of {len(exchanges)} exchanges can be extracted: {left_out[_TOO_LONG]} prompts have "
            f"{longest} tokens or more, {left_out[_NO_ROOM]} exchanges have no room; raise "
            "--max-length and --max-model-len, or --disk-gib."
        )
    total = sum(len(each.token_ids) for each in chosen)
    say(
        f"{len(chosen)} sequences, {total} tokens, {total * bytes_a_token / 2**20:.1f} MiB of hidden states"
    )
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _replay(engine_args, chosen, out, bytes_a_token)
    finally:
        shutil.rmtree(out / _STAGING, ignore_errors=True)
    for why, count in left_out.items():
        if count:
            say(f"{count} exchanges {why} and are left out.")
    if num_cut:
        say(f"{num_cut} sequences are cut to {max_length} tokens (--max-length).")


def _extracting(
    engine_args: EngineArgs, target_layer_ids: Sequence[int], staging: Path
) -> EngineArgs:
    """Return the target's options with vLLM's extraction set up."""
    for option in ("--speculative-config", "--kv-transfer-config"):
        if getattr(engine_args, option.strip("-").replace("-", "_")) is not None:
            raise ValueError(f"{option} is set by the extraction; leave it out.")
    return dataclasses.replace(
        engine_args,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {
                    # vLLM counts the embedding's output as the first.
                    "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in target_layer_ids]
                }
            },
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(staging.absolute())},
        },
        # Each sequence is one prompt: graphs of single tokens and blocks of others are of no use.
        enforce_eager=True,
        enable_prefix_caching=False,
    )


def _check(config: VllmConfig, target_layer_ids: Sequence[int]) -> None:
    num_layers = config.model_config.get_total_num_hidden_layers()
    layers = list(target_layer_ids)
    if not layers or not all(0 <= layer < num_layers - 1 for layer in layers):
        raise ValueError(
            f"target_layer_ids={layers} must be layers of the target, 0 to {num_layers - 2}; name the "
            "target of the draft that is to be trained."
        )
    # A checkpoint may resolve "auto".
    _check_cache(config.cache_config.cache_dtype)


def _check_cache(dtype: str) -> None:
    if dtype not in _CACHE_DTYPES:
        raise ValueError(
            f"--kv-cache-dtype {dtype}: a draft would learn the rounding of this cache as the "
            "target's; set it to auto or fp8."
        )


def _choose(
    exchanges: Sequence[Exchange], longest: int, max_tokens: int
) -> tuple[list[Exchange], int, dict[str, int]]:
    """Choose the exchanges to replay, newest first and cut to ``longest`` tokens.

    Returns:
        The exchanges, the number of those that are cut, and the number of the others by the reason.
    """
    chosen: list[Exchange] = []
    seen: set[bytes] = set()
    num_cut, left_out = 0, dict.fromkeys((_REPEATED, _TOO_LONG, _NO_ROOM), 0)
    for exchange in reversed(exchanges):
        prompt, output = exchange.prompt_token_ids, exchange.output_token_ids
        key = len(prompt).to_bytes(8, "little") + exchange.token_ids.tobytes()
        kept = dataclasses.replace(exchange, output_token_ids=output[: longest - len(prompt)])
        if key in seen:
            left_out[_REPEATED] += 1
        # An anchor and a token after it is the least that teaches anything.
        elif len(prompt) + 1 > longest or len(kept.token_ids) < 2:
            left_out[_TOO_LONG] += 1
        elif len(kept.token_ids) > max_tokens:
            left_out[_NO_ROOM] += 1
        else:
            num_cut += len(kept.output_token_ids) < len(output)
            max_tokens -= len(kept.token_ids)
            chosen.append(kept)
        seen.add(key)
    return chosen, num_cut, left_out


def _batches(
    exchanges: Sequence[Exchange], max_tokens: int
) -> Iterator[list[tuple[int, Exchange]]]:
    batch: list[tuple[int, Exchange]] = []
    tokens = 0
    for idx, exchange in enumerate(exchanges):
        size = len(exchange.token_ids)
        if batch and tokens + size > max_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append((idx, exchange))
        tokens += size
    yield batch


def _replay(
    engine_args: EngineArgs, exchanges: Sequence[Exchange], out: Path, bytes_a_token: int
) -> None:
    # An engine in this process writes a request's states in the step after it, if there is one.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM, SamplingParams

    engine_args.skip_tokenizer_init = True
    llm = LLM.from_engine_args(engine_args)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    start, done = time.monotonic(), 0
    for batch in _batches(exchanges, max(_BATCH_BYTES // bytes_a_token, 1)):
        outputs = llm.generate(
            [{"prompt_token_ids": list(exchange.token_ids)} for _, exchange in batch],
            params,
            use_tqdm=False,
        )
        for (idx, exchange), output in zip(batch, outputs, strict=True):
            _keep(output, exchange, out / sample_name(idx, exchange.is_held_out))
        done += len(batch)
        say(f"{done} of {len(exchanges)} sequences, {time.monotonic() - start:.0f} s")


def _keep(output: Any, exchange: Exchange, path: Path) -> None:
    """Move a request's states to ``path``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    written = output.kv_transfer_params["hidden_states_path"]
    try:
        tensors = load_hidden_states(written)
    except OSError as error:
        raise ValueError(
            f"The engine wrote no hidden states for {path.name}: {error}; is the disk full?"
        ) from None
    tensors["answer_start"] = torch.tensor(len(exchange.prompt_token_ids))
    save_file(tensors, path)
    cleanup_hidden_states(written)
