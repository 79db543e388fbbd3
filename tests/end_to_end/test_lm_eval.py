"""Tests of lm-eval with the server: generation over both endpoints, and log-likelihoods."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.engines.commands import run
from tests.support.engines.server import MODEL, Server

sys.path.append(str(Path(__file__).parents[2] / "examples" / "checkpoints"))
from tiny_tasks import evaluation_set

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_PROMPTS = 12
# Twelve held-out sums, 98 in 100 of which are right; a wrong answer of words is never likely.
LEAST_SCORE = 0.75

GENERATION = """
task: tiny_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
generation_kwargs: {{until: ["<turn|>"], max_gen_toks: 16, do_sample: true, temperature: 0.7}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICE = """
task: tiny_capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write task files with held-out questions of the shipped checkpoint."""
    folder = tmp_path_factory.mktemp("tasks")
    sums = [example for example in evaluation_set("sums", 100) if "," not in example.answer]
    rows = [
        {"question": example.filler + example.question, "answer": example.answer}
        for example in sums
        if not example.turns
    ]
    choices = [
        {"question": f"{row['question']} ", "choices": [row["answer"], "a wrong answer"]}
        for row in rows
    ]
    for name, lines in (("sums", rows), ("choices", choices)):
        text = "".join(json.dumps(line) + "\n" for line in lines[:NUM_PROMPTS])
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "sums.yaml").write_text(GENERATION.format(folder=folder))
    (folder / "choices.yaml").write_text(CHOICE.format(folder=folder))
    return folder


EVALUATIONS = {
    "chat": ("local-chat-completions", "chat/completions", "tiny_sums", "exact_match,none"),
    "completions": ("local-completions", "completions", "tiny_sums", "exact_match,none"),
    "log-likelihood": ("local-completions", "completions", "tiny_capitals", "acc,none"),
}


# lm-eval's command, once for each list of arguments. It reads its thousands of tasks longer than
# ours run.
COMMANDS = """
import functools, json, sys
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
for arguments in json.load(sys.stdin):
    sys.argv[1:] = arguments
    cli_evaluate()
"""


def test_lm_eval(server: Server, tasks: Path, tmp_path: Path) -> None:
    """lm-eval finishes over each endpoint, so no request was refused, with the model's score."""
    commands = [
        _arguments(model, endpoint, task, server, tasks, tmp_path / kind)
        for kind, (model, endpoint, task, _) in EVALUATIONS.items()
    ]
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "OPENAI_API_KEY": "-"}
    run(
        *(sys.executable, "-c", COMMANDS),
        input=json.dumps(commands),
        env=os.environ | environment,
        timeout=300 * len(commands),
    )
    server.wait_until_idle(30)
    for kind, (_, _, task, metric) in EVALUATIONS.items():
        (report,) = (tmp_path / kind).rglob("results_*.json")
        score = json.loads(report.read_text())["results"][task][metric]
        assert score >= LEAST_SCORE, kind


def _arguments(
    model: str, endpoint: str, task: str, server: Server, tasks: Path, folder: Path
) -> list[str]:
    settings = {
        "model": MODEL,
        "base_url": f"{server.url}/v1/{endpoint}",
        "num_concurrent": 4,
        "max_retries": 1,
        "tokenizer_backend": "huggingface",
        "tokenizer": server.checkpoint,
    }
    arguments = ["--model", model, "--tasks", task]
    arguments += ["--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
    arguments += ["--include_path", str(tasks), "--output_path", str(folder), "--seed", "7"]
    if endpoint == "chat/completions" or task == "tiny_sums":
        arguments.append("--apply_chat_template")
    return arguments
