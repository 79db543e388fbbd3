"""Refusals name their field, and their log is short."""

import logging

import pytest

from vllm_diffusion.startup.environment import MOST_ANSWERS, limit_answers

pytestmark = pytest.mark.engine


@pytest.fixture
def logger(caplog: pytest.LogCaptureFixture) -> logging.Logger:
    """Return a logger like vLLM's, without anyone else's filter."""
    from vllm_diffusion.requests.refusals import OneLineRefusals

    made = logging.Logger("refusals")
    made.addFilter(OneLineRefusals())
    made.addHandler(caplog.handler)
    return made


def log_error(logger: logging.Logger, error: Exception) -> None:
    """Log an exception as vLLM's stream generators do."""
    try:
        raise error
    except Exception:
        logger.exception("Error in completion stream generator.")


def test_one_line_for_many_refusals(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals log one line whatever the client wrote, and later how many were left out."""
    from vllm.exceptions import VLLMValidationError

    from vllm_diffusion.requests import refusals

    seconds = 100.0
    monkeypatch.setattr(refusals.time, "monotonic", lambda: seconds)
    for i in range(50):
        log_error(logger, VLLMValidationError(f"no field {i}\nERROR forged {'x' * 5000}"))
    seconds += refusals.SECONDS_A_LINE
    log_error(logger, VLLMValidationError("again"))
    first, second = caplog.records
    assert "\n" not in first.getMessage()
    assert len(first.getMessage()) < 400
    assert "(0 others" in first.getMessage()
    assert "(49 others" in second.getMessage()
    assert all(record.exc_info is None for record in caplog.records)


def test_other_errors_keep_their_trace(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that no client caused is logged with its trace each time."""
    for _ in range(3):
        log_error(logger, KeyError("26"))
    assert len(caplog.records) == 3
    assert all(record.exc_info for record in caplog.records)


def test_limit_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of answers is lowered once, and never if the operator has set it."""
    monkeypatch.delenv("VLLM_MAX_N_SEQUENCES", raising=False)
    assert (limit_answers(), limit_answers()) == (MOST_ANSWERS, None)
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "3")
    assert limit_answers() is None
