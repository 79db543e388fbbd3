"""vLLM's client of the engine in a server of a diffusion model: a request is read and refused
before its stream begins, and its constraint and texts are read off the event loop.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

from vllm.utils.async_utils import make_async
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_diffusion.requests.constraint import read_constraint_aside
from vllm_diffusion.requests.refusals import failing_aloud
from vllm_diffusion.requests.texts import brought_texts, made_tokens
from vllm_diffusion.requests.validation import admit
from vllm_diffusion.startup.plan import spec_of

# Requests of streams that an endpoint is about to begin.
_streamed: ContextVar[list[tuple[Any, ...]] | None] = ContextVar("noted_streams", default=None)


@contextlib.contextmanager
def noting_streams() -> Iterator[list[tuple[Any, ...]]]:
    """Collect what the block asks the engine for, as arguments of :meth:`CheckedClient.check`."""
    requests: list[tuple[Any, ...]] = []
    token = _streamed.set(requests)
    try:
        yield requests
    finally:
        _streamed.reset(token)


class CheckedClient(AsyncLLM):
    """vLLM's client of the engine, which has constraints read and texts made tokens in threads
    while the event loop serves others.
    """

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if (noted := _streamed.get()) is not None:
            noted.append((prompt, sampling_params, kwargs.get("lora_request")))
        return super().generate(prompt, sampling_params, *args, **kwargs)

    async def check(self, prompt: Any, params: Any, lora_request: Any = None) -> None:
        """Refuse a request as :meth:`add_request` would.

        Args:
            prompt: Rendered, or nothing where it is not known yet.
            params: The request's ``SamplingParams``.
            lora_request: Its adapter; ``None`` for none.

        Raises:
            VLLMValidationError: Naming the field.
        """
        async with self._read_aside(params):
            if spec_of(self.model_config) is not None:
                admit(params.clone(), self.input_processor, prompt, lora_request)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        async with self._read_aside(params):
            return await super().add_request(request_id, prompt, params, *args, **kwargs)

    @contextlib.asynccontextmanager
    async def _read_aside(self, params: Any) -> AsyncIterator[None]:
        """Within the block the request's constraint is read, and its texts are tokens."""
        constraint = getattr(params, "structured_outputs", None)
        with failing_aloud():
            await read_constraint_aside(constraint, self.vllm_config.structured_outputs_config)
            texts = brought_texts(params, self.input_processor)
        encode = make_async(self._tokens_of, executor=self.renderer._executor)
        with made_tokens({text: await encode(text) for text in texts}):
            yield

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self.renderer.tokenizer.encode(text, add_special_tokens=False))
