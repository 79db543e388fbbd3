"""Start the shipped checkpoint with each option of ``vllm serve``, and print the outcome.

python -m tests.robustness.serve_options [--only=OPTION ...] [--try="--option value" ...]

What is tried is in ``serve_options.toml``, beside this file. Each trial has a process of its own,
which answers 15 seeded requests; their tokens are compared with those of a server without the
option. Prints one line for each trial, and exits with 1 if one of them is not what the file says.
"""

import argparse
import multiprocessing
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

for _name, _value in (
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ("VLLM_LOGGING_LEVEL", "WARNING"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("HF_HUB_OFFLINE", "1"),
    ("OMP_NUM_THREADS", "1"),
):
    # Read by what is imported next.
    os.environ.setdefault(_name, _value)

# Small and quick; a trial's own options come after these, and win.
BASE = (
    "--max-model-len 512 --max-num-seqs 4 --enforce-eager --kv-cache-memory-bytes 33554432 "
    """--limit-mm-per-prompt '{"image": 0, "video": 0, "audio": 0}'"""
)
# Longer than a start takes on two busy cores.
SECONDS = 300
# Engine steps without an answer after which a request counts as stuck.
STEPS = 3000


@dataclass(frozen=True)
class Options:
    """Options of ``vllm serve``, and trials of them.

    Attributes:
        refused: What is refused, on the command line, by the option that is named in the refusal.
        served: Options that are served with the tokens of a server without them.
        served_with_other_tokens: Options that are served, and change the answers.
        known: Names of all options that are not refused.
    """

    refused: dict[str, str]
    served: tuple[str, ...]
    served_with_other_tokens: tuple[str, ...]
    known: tuple[str, ...]


_CONTENT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OPTIONS = Options(
    _CONTENT["refused"],
    tuple(_CONTENT["served"]),
    tuple(_CONTENT["served_with_other_tokens"]),
    tuple(_CONTENT["known"].split()),
)


def explains(sentence: str, message: str) -> bool:
    """Return true if ``message`` is a refusal's sentence with values in its places."""
    parts = re.split(r"\{[\w.]+\}", sentence)
    return re.fullmatch(".+?".join(map(re.escape, parts)), message) is not None


@dataclass(frozen=True)
class Outcome:
    """What became of a probe.

    Attributes:
        kind: ``"works"``, ``"other tokens"``, ``"refused"`` (our line), ``"trace"`` (vLLM refuses,
            before anything is loaded), ``"dead"`` (it fails or hangs while it loads or answers).
        line: What it said last.
        tokens: Of the requests.
    """

    kind: str
    line: str = ""
    tokens: tuple[tuple[int, ...], ...] = ()


def serve_parser() -> argparse.ArgumentParser:
    """vLLM's own parser of ``vllm serve``."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())


def run(options: str, log: Path) -> Outcome:
    """Start with ``options`` in a forked process, and answer requests.

    Args:
        options: As on the command line.
        log: File for what the process prints.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(options, sender, log))
    child.start()
    sender.close()
    outcome = Outcome("dead", f"no answer in {SECONDS} s")
    try:
        if receiver.poll(SECONDS):
            outcome = receiver.recv()
    except EOFError:
        outcome = Outcome("dead", "the process ended")
    child.join(20)
    with suppress(ProcessLookupError):
        # Its workers are in its group.
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    return outcome


def _child(options: str, sender: Connection, log: Path) -> None:
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sender.send(_outcome(options))
    sender.close()


def configure(options: str) -> Any:
    """The configuration of ``vllm serve`` with ``options``, before anything is loaded."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from tests.support.models.checkpoints import SHIPPED

    words = [str(SHIPPED), *shlex.split(BASE), *shlex.split(options)]
    arguments = serve_parser().parse_args(words)
    arguments.model = arguments.model_tag
    engine_args = EngineArgs.from_cli_args(arguments)
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _outcome(options: str) -> Outcome:
    from vllm_diffusion.startup.engine_process import refusal_in

    try:
        config = configure(options)
    except SystemExit:
        return Outcome("trace", "not understood by vLLM's parser")
    except Exception as error:
        line = refusal_in(error)
        return Outcome("trace", _last_line(error)) if line is None else Outcome("refused", line)
    try:
        return Outcome("works", tokens=_answers(config))
    except Exception as error:
        traceback.print_exc()
        return Outcome("dead", _last_line(error))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if "errors.pydantic.dev" not in line]
    text = lines[-1] if lines else ""
    return f"{type(error).__name__}: {text.partition(' [type=')[0]}"


def _answers(config: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of 15 requests that run together, each with other parameters."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from tests.support.models.prompts import random_prompt

    engine = LLMEngine.from_vllm_config(config)
    shared = random_prompt(70, 1)
    with_tokenizer = not config.model_config.skip_tokenizer_init
    greedy: dict[str, Any] = {"temperature": 0.0}
    three_steps = {"extra_args": {"diffusion_max_steps": 3}}
    requests: list[tuple[list[int], int, dict[str, Any]]] = [
        (shared, 12, greedy),
        (random_prompt(5, 2), 70, {}),
        (random_prompt(40, 3), 40, {"top_p": 0.9}),
        (random_prompt(9, 4), 9, {"presence_penalty": 1.0, "logprobs": 2}),
        (shared, 33, {}),
        (random_prompt(1, 5), 20, {"top_k": 20, "temperature": 0.7}),
        (random_prompt(17, 6), 20, {"min_p": 0.05}),
        (random_prompt(33, 7), 40, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}),
        (random_prompt(64, 8), 20, {"logit_bias": {70: 5.0}}),
        (shared, 20, {"logprobs": 3, **three_steps}),
        (random_prompt(120, 9), 70, greedy),
        (random_prompt(3, 10), 40, {"allowed_token_ids": list(range(40, 90))}),
        (random_prompt(130, 11), 33, {"top_p": 0.9, "min_p": 0.01, **three_steps}),
        (random_prompt(8, 12), 1, {}),
    ]
    if with_tokenizer:
        constraint = StructuredOutputsParams(regex="[a-c]{3,5}")
        requests.append((shared, 12, {"structured_outputs": constraint}))
    for index, (prompt, length, settings) in enumerate(requests):
        # A grammar decides itself where its answer ends.
        min_tokens = 0 if "structured_outputs" in settings else length
        engine.add_request(
            str(index),
            {"prompt_token_ids": prompt},
            SamplingParams(
                seed=index,
                max_tokens=length,
                min_tokens=min_tokens,
                detokenize=with_tokenizer,
                **settings,
            ),
            priority=index % 2 if config.scheduler_config.policy == "priority" else 0,
        )
    tokens: dict[int, tuple[int, ...]] = {}
    for _ in range(STEPS):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            if output.finished:
                tokens[int(output.request_id)] = tuple(output.outputs[0].token_ids)
    missing = [index for index in range(len(requests)) if index not in tokens]
    if missing:
        raise RuntimeError(f"requests {missing} had no answer after {STEPS} steps")
    return tuple(tokens[index] for index in range(len(requests)))


@dataclass(frozen=True)
class Trial:
    """One start, and what is said of it.

    Attributes:
        options: Options on the command line.
        expected: Kinds of outcomes that agree with the file; empty where it says nothing.
        sentence: Sentence of a refusal.
    """

    options: str
    expected: tuple[str, ...] = ()
    sentence: str = ""

    def agrees(self, outcome: Outcome) -> bool:
        """Return true if the outcome is that of the file."""
        if not self.expected:
            return True
        is_explained = not self.sentence or explains(self.sentence, outcome.line)
        return outcome.kind in self.expected and is_explained


def trials(only: list[str]) -> Iterator[Trial]:
    """All trials of the file, or those with one of some options."""
    from vllm_diffusion.startup.options import sentences

    everything = [
        *(
            Trial(options, ("refused",), sentences()[name])
            for name, options in OPTIONS.refused.items()
        ),
        *(Trial(options, ("works",)) for options in OPTIONS.served),
        *(
            Trial(options, ("works", "other tokens"))
            for options in OPTIONS.served_with_other_tokens
        ),
    ]
    for trial in everything:
        if not only or set(only) & set(trial.options.split()):
            yield trial


def against(plain: Outcome, outcome: Outcome) -> Outcome:
    """``outcome``, with other tokens than those of a start without options called so."""
    if outcome.kind == "works" and outcome.tokens != plain.tokens[: len(outcome.tokens)]:
        return replace(outcome, kind="other tokens")
    return outcome


def _prepare() -> None:
    """What every trial needs, found out once: the forks inherit it."""
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs

    import vllm_diffusion.families.diffusion_gemma.model  # noqa: F401
    from tests.support.models.checkpoints import SHIPPED

    EngineArgs(model=str(SHIPPED), max_model_len=512).create_engine_config()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="OPTION")
    parser.add_argument("--try", action="append", default=[], dest="options", metavar="OPTIONS")
    chosen = parser.parse_args()
    chosen_trials = [Trial(options) for options in chosen.options]
    if chosen.only or not chosen.options:
        chosen_trials += trials(chosen.only)
    _prepare()
    folder = Path(tempfile.mkdtemp(prefix="serve-options-"))
    plain = run("", folder / "plain")
    if plain.kind != "works":
        print(f"without options: {plain.kind}: {plain.line}; see {folder / 'plain'}")
        return 1
    kinds: Counter[str] = Counter()
    wrong = 0
    for index, trial in enumerate(chosen_trials):
        start = time.monotonic()
        log = folder / str(index)
        outcome = against(plain, run(trial.options.replace("{folder}", str(folder)), log))
        kinds[outcome.kind] += 1
        agrees = trial.agrees(outcome)
        wrong += not agrees
        note = "" if agrees else f"  <- not {' or '.join(trial.expected)}; see {log}"
        seconds = time.monotonic() - start
        print(
            f"{outcome.kind:12} {seconds:4.0f} s  {trial.options}  {outcome.line}{note}", flush=True
        )
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), f"; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
