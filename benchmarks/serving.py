"""Folders to serve at a fixed number of denoise steps, and servers of them under ``vllm bench sweep``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_diffusion.cli.server import free_port

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
NO_IMAGES = ["--limit-mm-per-prompt", '{"image":0,"video":0,"audio":0}']
LOG_CHARACTERS = 4000
# Tokens of a prompt, and requests at once.
Run = tuple[int, int]


def fix_steps(folder: Path, steps: int) -> None:
    """Write settings under which no canvas converges before the cap, here as in stock vLLM."""
    path = folder / "generation_config.json"
    # A canvas is stable once it equals those of this many steps before it, and there are fewer.
    fixed = {"max_denoising_steps": steps, "stability_threshold": steps}
    path.write_text(json.dumps(json.loads(path.read_text()) | fixed))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One word a token, ``w3 w4 ...``: a text of n words has n tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Not the beginning of any word: a special token is found inside of words too.
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    names = [*special.values(), *(f"w{i}" for i in range(len(special), vocab_size))]
    words = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def prepare(source: Path, target: Path, steps: int) -> None:
    """Fill ``target`` from a checkpoint, or a config alone; what is there is replaced.

    Weights are linked. A source without a tokenizer gets one of as many invented words as the model has
    tokens, so that prompts of a given length can be written and answers be read.

    Raises:
        ValueError: If ``source`` lacks what every checkpoint has.
    """
    for name in ("config.json", "generation_config.json"):
        if not (source / name).is_file():
            raise ValueError(
                f"{source} has no {name}; name a folder with a checkpoint or a config."
            )
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, target)
        elif path.suffix == ".safetensors":
            (target / path.name).symlink_to(path.resolve())
    fix_steps(target, steps)
    if not (target / "tokenizer.json").is_file():
        config = json.loads((target / "config.json").read_text())
        write_tokenizer(target, config.get("text_config", config)["vocab_size"])


def passes_of(log: str, steps: int) -> int:
    """Return the passes of a canvas, from one that comes to the next.

    Only our server can encode a canvas in the pass of the next one's first step, and says so when it
    starts. Stock takes a pass of its own for that, and so does ours in the asynchronous order, with
    another attention back end, or in a family that needs the pass.

    Args:
        log: What the server printed.
        steps: Denoising steps of a canvas.
    """
    return steps if "encode fused with the next canvas" in log else steps + 1


@dataclass(frozen=True)
class Sweep:
    """Requests of every side, and where its results go.

    Attributes:
        out: Folder; results are ``out/SIDE/*/summary.json``, and what was printed is ``out/SIDE.log``.
        runs: Tokens of a prompt and requests at once, of each run.
        output_len: Tokens of an answer.
        prompts: Requests of a run, at the least; four for each that is asked at once.
        start_seconds: That a server may take to start.
    """

    out: Path
    runs: Sequence[Run]
    output_len: int
    prompts: int
    start_seconds: int = 1800

    def of(
        self, side: str, folder: Path, options: Sequence[str], variables: dict[str, str]
    ) -> dict[Run, dict[str, Any]]:
        """Serve a folder as one side does, and ask it in every run; the results of each.

        Args:
            side: Name of the side.
            folder: What is served; weights are random where it has none.
            options: Of ``vllm serve``.
            variables: Of its environment.

        Raises:
            ValueError: If a result is missing, or a request failed.
        """
        self._serve(side, folder, options, variables)
        return self.read(side)

    def _serve(
        self, side: str, folder: Path, options: Sequence[str], variables: dict[str, str]
    ) -> None:
        address = ["--host", "127.0.0.1", "--port", str(free_port())]
        load_format = "auto" if any(folder.glob("*.safetensors")) else "dummy"
        serve = [*VLLM, "serve", str(folder), *address, "--served-model-name", "model"]
        serve += ["--load-format", load_format, *NO_IMAGES, *options]
        # Stock refuses any temperature but 1.
        bench = [*VLLM, "bench", "serve", *address, "--model", "model", "--tokenizer", str(folder)]
        bench += ["--dataset-name", "random", "--random-output-len", str(self.output_len)]
        bench += ["--ignore-eos", "--temperature", "1", "--disable-tqdm"]
        asked = [
            {
                "random_input_len": length,
                "max_concurrency": clients,
                "num_prompts": max(4 * clients, self.prompts),
                "num_warmups": clients,
                "seed": clients,
            }
            for length, clients in self.runs
        ]
        parameters = self.out / "bench_params.json"
        parameters.write_text(json.dumps(asked))
        command = [*VLLM, "bench", "sweep", "serve", "--show-stdout", "--num-runs", "1"]
        command += ["--serve-cmd", shlex.join(serve), "--bench-cmd", shlex.join(bench)]
        # Prompts of two runs differ, so that no cache has to be emptied.
        command += ["--after-bench-cmd", "true", "--bench-params", str(parameters)]
        command += ["--server-ready-timeout", str(self.start_seconds)]
        command += ["--output-dir", str(self.out), "--experiment-name", side]
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        print(f"serving: {side}", file=sys.stderr, flush=True)
        with self.log(side).open("wb") as log:
            # What it wrote decides: its own table of all results needs pandas, which may be missing.
            subprocess.run(
                command, env=os.environ | quiet | variables, stdout=log, stderr=log, check=False
            )

    def log(self, side: str) -> Path:
        """The file of what a side printed."""
        return self.out / f"{side}.log"

    def said(self, side: str) -> str:
        """What a side printed."""
        return self.log(side).read_text(errors="replace")

    def read(self, side: str) -> dict[Run, dict[str, Any]]:
        """One side's results; errors as of :meth:`of`."""
        found: dict[Run, dict[str, Any]] = {}
        for path in (self.out / side).glob("*/summary.json"):
            (run,) = json.loads(path.read_text())
            found[run["random_input_len"], run["max_concurrency"]] = run
        for length, clients in self.runs:
            run = found.get((length, clients))
            if run is None:
                wrong = f"{side} did not answer {clients} at once with prompts of {length}"
            elif (failed := run["failed"]) or run["completed"] != run["num_prompts"]:
                wrong = f"{side} at {clients}: {failed} of {run['num_prompts']} requests failed"
            else:
                continue
            tail = self.said(side)[-LOG_CHARACTERS:]
            raise ValueError(f"{tail}\n{wrong}; its log is {self.log(side)}.")
        return found
