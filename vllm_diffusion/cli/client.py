"""HTTP client of the commands: for a server's own paths, its counters, and the OpenAI API."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_diffusion.cli.console import CommandError
from vllm_diffusion.cli.values import is_loopback

if TYPE_CHECKING:
    import httpx
    from openai import OpenAI
    from prometheus_client.samples import Sample

KEY_VARIABLE = "VLLM_API_KEY"
# The official client wants a key, also for a server that asks for none.
_NO_KEY = "none"
# Seconds without a word of a server after which it is given up.
ANSWER_SECONDS = 300.0
_METRICS_SECONDS = 60.0
# Seconds between two looks at the counter of answered requests.
_COUNTED_SECONDS = 0.02
ANSWERED = "vllm:request_success_total"


class ServerError(CommandError):
    """A server that did not start, stopped, or does not answer. The message is for the user."""


def ask(
    url: str,
    *,
    method: str = "GET",
    body: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    timeout: float,
    is_own: bool = False,
) -> httpx.Response:
    """Send one request, and return the answer, whatever its status is.

    Args:
        url: The whole address. A proxy of the environment is used for other machines only.
        method: The request's method.
        body: An object that is sent as JSON.
        api_key: The server's key, if it has one.
        timeout: Seconds without a byte after which the request fails.
        is_own: Whether this process started the server, whose certificate it then takes as it is.

    Raises:
        OSError: If there is no answer.
    """
    # Commands that ask nobody start without it.
    import httpx

    is_near = is_own or is_loopback(urlsplit(url).hostname or "")
    try:
        return httpx.request(
            method,
            url,
            json=body,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=timeout,
            verify=not is_own,
            trust_env=not is_near,
            follow_redirects=True,
        )
    except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
        raise OSError(str(error) or type(error).__name__) from error


def openai_client(url: str, api_key: str | None = None) -> OpenAI:
    """Make the official client of a server of vLLM.

    Args:
        url: The root of the server.
        api_key: The server's key; by default that of the environment, if it has one.
    """
    from openai import DefaultHttpxClient, OpenAI

    return OpenAI(
        base_url=f"{url}/v1",
        api_key=api_key or os.environ.get(KEY_VARIABLE) or _NO_KEY,
        timeout=ANSWER_SECONDS,
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=not is_loopback(urlsplit(url).hostname or "")),
    )


def read_metrics(url: str) -> list[Sample]:
    """Read all samples of the ``/metrics`` of the server at this root.

    Raises:
        ServerError: If the server does not answer.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        answer = ask(f"{url}/metrics", timeout=_METRICS_SECONDS)
    except OSError as error:
        raise ServerError(f"{url}/metrics cannot be read: {error}.") from None
    if not answer.is_success:
        raise ServerError(f"{url}/metrics cannot be read: HTTP {answer.status_code}.")
    families = text_string_to_metric_families(answer.text)
    return [sample for family in families for sample in family.samples]


def metrics_after(url: str, num_answered: float, seconds: float) -> list[Sample]:
    """Read ``/metrics`` once so many requests are in it, which is a moment after their last tokens.

    Args:
        url: The root of the server.
        num_answered: Requests that the server has answered since it started.
        seconds: Time after which the samples are returned as they are.

    Raises:
        ServerError: As in :func:`read_metrics`.
    """
    deadline = time.monotonic() + seconds
    while True:
        samples = read_metrics(url)
        is_counted = totals(samples).get(ANSWERED, 0.0) >= num_answered
        if is_counted or time.monotonic() > deadline:
            return samples
        time.sleep(_COUNTED_SECONDS)


def totals(samples: Iterable[Sample], label: str | None = None) -> dict[str, float]:
    """Sum samples by name, or by a label that all of them have."""
    sums: dict[str, float] = {}
    for sample in samples:
        key = sample.name if label is None else sample.labels[label]
        sums[key] = sums.get(key, 0.0) + sample.value
    return sums
