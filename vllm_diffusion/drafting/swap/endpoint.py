"""Endpoint that replaces the draft of a running server.

vLLM loads this where ``VLLM_PLUGINS`` names it. It reaches the engine by vLLM's own weight updates
and pauses alone.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict
from vllm.logger import init_logger

from vllm_diffusion.drafting.swap import DROP, PATH, RESTORE
from vllm_diffusion.drafting.swap.new_draft import check_new_draft, check_replaceable
from vllm_diffusion.startup.options import DRAFT_TRANSFER

logger = init_logger(f"vllm.{__name__}")


class SwapRequest(BaseModel):
    """The body of a swap.

    Attributes:
        model: Absolute path of the new draft's folder, as the server sees it.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str


class DraftSwaps:
    """Plugin of vLLM's group ``vllm.endpoint_plugins``.

    Attributes:
        name: Name in ``VLLM_PLUGINS``.
        required_tasks: Tasks of which the server must have one.
    """

    name = "vllm_diffusion_draft"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        # One swap at a time.
        self._lock = asyncio.Lock()

    def attach_router(self, app: FastAPI) -> None:
        """Add the endpoint."""
        app.get(PATH, summary="The draft that is served")(self.status)
        app.post(PATH, summary="Have another draft take its place")(self.take)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Read the served draft's name from the engine."""
        self._engine = engine_client
        self._refusal = _refusal(engine_client, args)
        spec = engine_client.vllm_config.speculative_config
        self._model = "" if spec is None else str(spec.model)
        if self._refusal is not None:
            logger.warning("%s takes no draft: %s", PATH, self._refusal)

    async def status(self) -> dict[str, str]:
        """The served draft.

        Raises:
            HTTPException: 400 where no draft can be replaced.
        """
        self._check_server()
        return {"model": self._model}

    async def take(self, request: SwapRequest) -> dict[str, str]:
        """Load another draft, which serves from then on.

        Raises:
            HTTPException: 400 if it does not fit, 409 if something else is under way, 500 if the
                engine fails to load it; the old one serves then.
        """
        self._check_server()
        if self._lock.locked():
            raise HTTPException(
                HTTPStatus.CONFLICT,
                f"another draft is being loaded (GET {PATH}): wait until it is.",
            )
        async with self._lock:
            folder = Path(request.model)
            # Here, before any worker is called: a worker's refusal is a trace in the log.
            try:
                await asyncio.to_thread(check_new_draft, folder, self._engine.vllm_config)
            except ValueError as error:
                raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
            await self._begin()
            try:
                await self._send(path=request.model)
            except Exception as error:
                raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
            try:
                async with self._paused():
                    await self._engine.finish_weight_update()
                # Every rank has loaded it, so that none needs the old weights any more.
                await self._begin()
                await self._send(replaced=DROP)
                await self._engine.finish_weight_update()
            except Exception as error:
                await self._give_up()
                raise HTTPException(
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    f"the draft could not be loaded ({error}); the old one serves.",
                ) from None
            replaced, self._model = self._model, request.model
            logger.info("The draft %s replaced %s.", self._model, replaced)
            return {"model": self._model, "replaced": replaced}

    async def _begin(self) -> None:
        if await self._engine.is_paused():
            raise HTTPException(
                HTTPStatus.CONFLICT,
                "the server is paused or asleep: POST /resume or /wake_up first.",
            )
        try:
            await self._engine.start_draft_weight_update()
        except Exception as error:
            raise HTTPException(
                HTTPStatus.CONFLICT, f"no update of the draft could begin: {error}"
            ) from None

    async def _send(self, **update_info: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def _give_up(self) -> None:
        """End a failed update; workers that had loaded the new draft get the old one back."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await self._engine.finish_weight_update()
        try:
            await self._begin()
            await self._send(replaced=RESTORE)
            async with self._paused():
                await self._engine.finish_weight_update()
        except Exception:
            logger.info("No worker had begun to load the draft.", exc_info=True)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the engine between two passes, with every cache empty.

        Requests in flight keep their tokens. Their cache is computed anew: otherwise the new draft
        would read the old one's keys and values, and a proposal of the old one would be verified.
        """
        try:
            await self._engine.pause_generation(mode="keep")
            yield
        finally:
            await self._engine.resume_generation()

    def _check_server(self) -> None:
        if self._refusal is not None:
            raise HTTPException(HTTPStatus.BAD_REQUEST, self._refusal)


def _refusal(engine_client: Any, args: Any) -> str | None:
    """Return the reason why this server's draft cannot be replaced; ``None`` if it can."""
    config = engine_client.vllm_config
    try:
        check_replaceable(config)
    except ValueError as error:
        return str(error)
    backend = getattr(config.weight_transfer_config, "backend", None)
    if backend != DRAFT_TRANSFER:
        return (
            f"--weight-transfer-config: a draft comes by backend {DRAFT_TRANSFER!r}, and the server has "
            f'{backend!r}; start it with --weight-transfer-config \'{{"backend": "{DRAFT_TRANSFER}"}}\'.'
        )
    if (args.api_server_count or 1) > 1:
        return "--api-server-count: one process must know which draft is served; set it to 1."
    return None
