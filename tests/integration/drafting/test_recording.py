"""An engine that records its answers."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.draft_engine import PROMPTS, draft_spec, generate, saved_target, serving
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.drafting.recording import read_recording

pytestmark = [pytest.mark.engine]


@pytest.mark.parametrize(
    ("is_async", "with_draft", "adaptive"),
    [
        (True, True, True),
        pytest.param(False, True, False, marks=pytest.mark.slow),
        pytest.param(True, False, False, marks=pytest.mark.slow),
        pytest.param(False, True, True, marks=pytest.mark.slow),
    ],
)
def test_records_its_answers(
    is_async: bool, with_draft: bool, adaptive: bool, tmp_path: Path
) -> None:
    """An engine records each answer once and as it was returned, an aborted one as far as it was
    generated, and none of a request that opts out.
    """
    drafting = {"record": {"folder": str(tmp_path / "recording"), "max_mib": 1}}
    spec = draft_spec(tmp_path) if with_draft else None
    drafting |= {"adaptive": True} if adaptive else {}
    with serving(tmp_path, spec, drafting, async_scheduling=is_async) as engine:
        said = generate(engine, PROMPTS[:6])
        generate(engine, PROMPTS[6:7], extra_args={"record": False})
        params = engine.sampling_params(max_tokens=200, ignore_eos=True, detokenize=False)
        running = engine.llm.llm_engine
        running.add_request("aborted", {"prompt_token_ids": PROMPTS[7]}, params)
        for _ in range(6):
            running.step()
        (internal,) = engine.scheduler.requests
        running.abort_request(["aborted"])
        assert not engine.scheduler.requests, internal
        engine.scheduler.shutdown()
    found = {
        tuple(each.prompt_token_ids): list(each.output_token_ids)
        for each in read_recording(tmp_path / "recording").exchanges
    }
    aborted = found.pop(tuple(PROMPTS[7]))
    assert 0 < len(aborted) < 200
    assert found == {
        tuple(prompt): list(output.outputs[0].token_ids)
        for prompt, output in zip(PROMPTS, said, strict=False)
    }


def test_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """Before anything is loaded, recording is refused for a folder that others may read, another
    scheduler or a diffusion model, and adaptive drafting without a draft.
    """
    from vllm.engine.arg_utils import EngineArgs

    def configure(model: Path, record: Any, **options: Any) -> None:
        drafting = {"record": record} if record else {"adaptive": True}
        EngineArgs(
            model=str(model), additional_config={"drafting": drafting}, **options
        ).create_engine_config()

    target = saved_target(tmp_path)
    ours = {"folder": str(tmp_path / "recording")}
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"record.folder=.* is open to other users \(mode 755\)"):
        configure(target, {"folder": str(tmp_path / "open")})
    with pytest.raises(ValueError, match="record needs its own scheduler"):
        configure(target, ours, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    with pytest.raises(ValueError, match="record is for autoregressive targets"):
        configure(SHIPPED, ours)
    assert not (tmp_path / "recording").exists()
    with pytest.raises(ValueError, match="adaptive=true needs a draft"):
        configure(target, None)
