"""Folders to serve at a fixed number of denoise steps, and servers of them under ``vllm bench
serve``.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_diffusion.cli.client import ServerError
from vllm_diffusion.cli.server import HOST, Server

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

    Weights are linked. A source without a tokenizer gets one of as many invented words as the model
    has tokens, so that prompts of a given length can be written and answers be read.

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

    Only our server can encode a canvas in the pass of the next one's first step, and says so when
    it starts. Stock takes a pass of its own for that, and so does ours in the asynchronous order,
    with another attention back end, or in a family that needs the pass.

    Args:
        log: What the server printed.
        steps: Denoising steps of a canvas.
    """
    return steps if "encode fused with the next canvas" in log else steps + 1


@dataclass(frozen=True)
class Side:
    """How one side serves.

    Attributes:
        name: Of its log and its results.
        folder: What is served; weights are random where it has none.
        options: Of ``vllm serve``.
        variables: Of its environment.
    """

    name: str
    folder: Path
    options: Sequence[str]
    variables: dict[str, str]


@dataclass(frozen=True)
class Sweep:
    """Requests of every side, and where its results go.

    Attributes:
        out: Folder; results are ``out/SIDE/*.json``, and what was printed is ``out/SIDE.log``.
        runs: Tokens of a prompt and requests at once, of each run.
        output_len: Tokens of an answer.
        prompts: Requests of a run, at the least.
        rounds: Requests for each that is asked at once.
        start_seconds: That a server may take to start.
    """

    out: Path
    runs: Sequence[Run]
    output_len: int
    prompts: int
    rounds: int = 4
    start_seconds: int = 1800

    def of(self, sides: Sequence[Side]) -> Iterator[tuple[str, Run, dict[str, Any]]]:
        """Serve the sides at once, and ask them in turns; each result as it comes, and whose it is.

        Raises:
            ValueError: If a server does not start, a result is missing, or a request failed.
        """
        with ExitStack() as stack, ThreadPoolExecutor(len(sides)) as starting:
            servers = list(starting.map(lambda side: stack.enter_context(self.serve(side)), sides))
            for run in self.runs:
                for side, server in zip(sides, servers, strict=True):
                    self.ask(side, server, run)
                    yield side.name, run, self.read(side.name, run)

    @contextmanager
    def serve(self, side: Side) -> Iterator[Server]:
        """Run a side's server.

        Raises:
            ValueError: If it does not start; its log is kept.
        """
        load_format = "auto" if any(side.folder.glob("*.safetensors")) else "dummy"
        command = [*VLLM, "serve", str(side.folder), "--host", HOST, "--port", "{port}"]
        command += ["--served-model-name", "model", "--load-format", load_format]
        command += [*NO_IMAGES, *side.options]
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        server = Server(
            command,
            report=lambda line: print(f"{side.name}: {line}", file=sys.stderr, flush=True),
            timeout=self.start_seconds,
            environment=quiet | side.variables,
        )
        try:
            with server:
                yield server
        except ServerError as error:
            shutil.move(server.log_path, self.log(side.name))
            raise ValueError(f"{self._end_of(side.name)}\n{side.name}: {error}") from None

    def ask(self, side: Side, server: Server, run: Run) -> None:
        """Ask a server as ``vllm bench serve`` does, which writes a result if it has one; keep the
        log by then.
        """
        length, clients = run
        path = self.result(side.name, run)
        path.unlink(missing_ok=True)
        command = [*VLLM, "bench", "serve", "--base-url", server.url, "--model", "model"]
        command += ["--tokenizer", str(side.folder), "--dataset-name", "random"]
        command += ["--random-input-len", str(length), "--random-output-len", str(self.output_len)]
        command += ["--max-concurrency", str(clients), "--num-warmups", str(clients)]
        num_prompts = max(self.rounds * clients, self.prompts)
        command += ["--num-prompts", str(num_prompts), "--seed", str(clients)]
        # Stock refuses any temperature but 1.
        command += ["--ignore-eos", "--temperature", "1", "--disable-tqdm", "--save-result"]
        command += ["--result-dir", str(path.parent), "--result-filename", path.name]
        quiet = {"OPENAI_API_KEY": server.api_key, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=os.environ | quiet, stdout=subprocess.DEVNULL, check=False)
        shutil.copy(server.log_path, self.log(side.name))

    def read(self, side: str, run: Run) -> dict[str, Any]:
        """A side's result of a run; errors as of :meth:`of`."""
        length, clients = run
        path = self.result(side, run)
        if not path.exists():
            wrong = f"{side} did not answer {clients} at once with prompts of {length}"
        else:
            found: dict[str, Any] = json.loads(path.read_text())
            failed, asked = found["failed"], found["num_prompts"]
            if not failed and found["completed"] == asked:
                return found
            wrong = f"{side} at {clients}: {failed} of {asked} requests failed"
        raise ValueError(f"{self._end_of(side)}\n{wrong}; its log is {self.log(side)}.")

    def _end_of(self, side: str) -> str:
        return self.said(side)[-LOG_CHARACTERS:]

    def result(self, side: str, run: Run) -> Path:
        """The file of what a side answered in a run."""
        length, clients = run
        return self.out / side / f"{length}-{clients}.json"

    def log(self, side: str) -> Path:
        """The file of what a side printed."""
        return self.out / f"{side}.log"

    def said(self, side: str) -> str:
        """What a side printed."""
        return self.log(side).read_text(errors="replace")
