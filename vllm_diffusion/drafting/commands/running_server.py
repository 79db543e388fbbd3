"""Servers that run already, which a comparison asks and leaves as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_diffusion.cli.answer import first_model
from vllm_diffusion.cli.client import openai_client, read_metrics

if TYPE_CHECKING:
    from prometheus_client.samples import Sample


class RunningServer:
    """Server that somebody else has started, with the key of the environment; it is not stopped.

    Attributes:
        url: Its root.
        model: Name of its first model.
    """

    api_key = None

    def __init__(self, url: str) -> None:
        """Ask for its model.

        Raises:
            AnswerError: If it cannot be reached, or takes no such key.
        """
        self.url = url
        self.model = first_model(openai_client(url))

    def samples(self) -> list[Sample]:
        """Read all samples of the server's ``/metrics``."""
        return read_metrics(self.url)

    def processes(self) -> list[int]:
        """Return no process: those of the server are not known."""
        return []
