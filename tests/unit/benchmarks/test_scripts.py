"""Runs the campaign's scripts to their end, at a small size on a CPU."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import records
from serving import prepare

from tests.support.counters import baselines
from vllm_diffusion.checkpoints import shipped_checkpoint

ROOT = records.ROOT
# Of what the campaign's rehearsal (test_campaign.py) runs too, the scripts that check answers.
KERNELS = (
    "gpu/check_gpu.py",
    "gpu/check_gpu.py --attention cute",
    "bench_canvas_attention.py --requests 1 --contexts 20 --phases denoise --peers unsplit split-2 keys-16",
    "bench_sampler.py --canvases 1 --hidden 16 --repeats 1",
)
TINY = "bench_serve.py --concurrency 1 --prompts 2 --model vllm_diffusion/checkpoints"
SERVED = (
    "gpu/answers.py --prompts 2",
    "bench_serve.py --sides ours stock --together --concurrency 1 --prompts 2 --steps 4 "
    "--options='--worker-extension-cls awake_experts.WorkerExtension --hf-overrides.awake_experts 84'",
    "bench_serve.py --sides tuned autoregressive linear_spec --concurrency 1 --prompts 2 --steps 4",
    f"{TINY}/tiny_sdar --sides ours --steps 2",
    "bench_formats.py --formats fp8-dynamic nvfp4-weights --no-autoregressive --shape tiny --prompts 1 --steps 4",
)
# All in one process, which imports torch once.
CODE = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, words
"""


def rows_of(tmp_path, scripts):
    data = [tmp_path / f"{i}.jsonl" for i in range(len(scripts))]
    words = [
        [f"benchmarks/{path}", "--data", str(file), *options]
        for (path, *options), file in zip(map(shlex.split, scripts), data, strict=True)
    ]
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks/gpu")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, "-c", CODE, json.dumps(words)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return [records.read(file) for file in data]


@pytest.mark.slow
@pytest.mark.engine
def test_scripts_of_kernels(tmp_path):
    """Each script of kernels writes rows, and all rows of checks are right."""
    for rows in rows_of(tmp_path, KERNELS):
        assert rows
        assert {row.get("state", "right") for row in rows} == {"right"}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("script", SERVED)
def test_scripts_that_serve(tmp_path, script):
    """A script that serves writes a row for each of its sides, and schemas are followed."""
    (rows,) = rows_of(tmp_path, [script])
    assert rows
    sides = script.partition("--sides ")[2].partition(" --")[0].split()
    assert sorted(row["side"] for row in rows if row["table"] == "serving") == sorted(sides)
    broken = [row["broken"] for row in rows if row["table"] == "grammars"]
    assert broken == [0] * ("answers.py" in script)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("awake", "most"), [("--awake 42", 42), ("", 64)])
def test_an_engine_wakes_no_more_experts_than_asked(awake, most, tmp_path):
    """With ``--awake 42`` the canvases choose about 42 of 64 experts per layer, without it more."""
    folder = tmp_path / "model"
    prepare(shipped_checkpoint(), folder, steps=4)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    script = f"bench_routing.py {folder} --load-format dummy --canvases 8 {awake}"
    (rows,) = rows_of(tmp_path, [script])
    (row,) = rows
    assert row["experts"] == 64
    assert most - 21 < row["most"] <= most


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_baselines_of_passes(tmp_path):
    """Answers of one and several canvases take no more passes than the baseline, in every order."""
    script = "bench_passes.py --rounds 1 --orders fused asynchronous"
    (rows,) = rows_of(tmp_path, [script])
    passes = {f"{row['workload']}, {row['order']}": {"passes": row["passes"]} for row in rows}
    baselines.check("passes of an answer", passes)
