"""Endpoint that replaces the draft of a running server: loaded, tried, and kept or rolled back.

vLLM loads this where ``VLLM_PLUGINS`` names it. It reaches the engine by vLLM's own weight updates and
pauses alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_diffusion.drafting.accepted import LEAST, MOST, NUM_ERRORS, Verifications, places_of_both
from vllm_diffusion.drafting.swap import DROP, KEPT, PATH, PENDING, RESTORE, ROLLED_BACK
from vllm_diffusion.drafting.swap.new_draft import check_new_draft, check_replaceable
from vllm_diffusion.startup.options import DRAFT_TRANSFER

logger = init_logger(f"vllm.{__name__}")


class SwapRequest(BaseModel):
    """The body of a swap.

    Attributes:
        model: Absolute path of the new draft's folder, as the server sees it.
        verifications: Number of the new draft's verifications after which it is judged, against as
            many of the old one's.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    verifications: int = Field(default=500, ge=LEAST, le=MOST)


@dataclass
class Swap:
    """A draft that took another one's place.

    Attributes:
        model: Path of the new draft.
        replaced: Path of the old draft.
        wanted: Number of verifications after which the new draft is judged.
        before: Latest verifications of the old draft.
        after: Verifications of the new draft, up to the judgement.
        state: "pending", "kept" or "rolled back".
        reason: Reason of the state.
    """

    model: str
    replaced: str
    wanted: int
    before: Verifications
    after: Verifications
    state: str = PENDING
    reason: str = ""

    def shown(self) -> dict[str, Any]:
        """Return the swap as the endpoint's JSON object."""
        places = places_of_both(self.before, self.after)
        return {
            "model": self.model,
            "replaced": self.replaced,
            "state": self.state,
            "reason": self.reason or f"it is judged after {self.wanted} verifications",
            "before": _figures(self.before, places),
            "after": _figures(self.after, places),
        }


def _figures(counts: Verifications, places: int) -> dict[str, Any]:
    found = counts.yield_of(places)
    return {
        "verifications": counts.number,
        "tokens_per_verification": round(found.tokens, 4) if counts.number else None,
        "standard_error": round(found.standard_error, 4) if counts.number else None,
        "accepted_by_position": counts.accepted,
    }


class DraftSwaps:
    """Plugin of vLLM's group ``vllm.endpoint_plugins``.

    Attributes:
        name: Name in ``VLLM_PLUGINS``.
        required_tasks: Tasks of which the server must have one.
    """

    name = "vllm_diffusion_draft"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._swap: Swap | None = None
        # Verifications of the served draft, step by step, as many as a swap may ask for.
        self._latest: deque[Verifications] = deque()
        self._num_latest = 0
        # One swap, judgement or return at a time.
        self._lock = asyncio.Lock()
        self._judgement: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the endpoint."""
        for method, function, summary in (
            ("GET", self.status, "The draft that is served, and what became of the last swap"),
            ("POST", self.take, "Have another draft take its place"),
            ("DELETE", self.put_back, "Put the old one back before the new one is judged"),
        ):
            app.add_api_route(PATH, function, methods=[method], summary=summary)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Read the served draft's name from the engine, and start to count its verifications."""
        self._engine = engine_client
        self._refusal = _refusal(engine_client, args)
        spec = engine_client.vllm_config.speculative_config
        self._model = "" if spec is None else str(spec.model)
        if self._refusal is None:
            engine_client.logger_manager.stat_loggers.append(_Counter(self))
        else:
            logger.warning("%s takes no draft: %s", PATH, self._refusal)

    async def status(self) -> dict[str, Any]:
        """The served draft, and the last swap.

        Raises:
            HTTPException: 400 where no draft can be replaced.
        """
        self._check_server()
        return {"model": self._model, "swap": self._swap and self._swap.shown()}

    async def take(self, request: SwapRequest) -> dict[str, Any]:
        """Load another draft, and begin to try it.

        Raises:
            HTTPException: 400 if it does not fit, 409 if something else is under way.
        """
        self._check_server()
        if self._lock.locked() or (self._swap is not None and self._swap.state == PENDING):
            raise HTTPException(
                HTTPStatus.CONFLICT,
                f"a swap is pending (GET {PATH}): wait until it is judged, or put the old draft back "
                f"(DELETE {PATH}).",
            )
        async with self._lock:
            folder = Path(request.model)
            # Here, before any worker is asked: a worker's refusal is a trace in the log.
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
                    self._swap = Swap(
                        request.model,
                        self._model,
                        request.verifications,
                        self._before(request.verifications),
                        Verifications(),
                    )
                    self._model = request.model
            except Exception as error:
                await self._give_up()
                raise HTTPException(
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    f"the draft could not be loaded ({error}); the old one serves.",
                ) from None
            logger.info("The draft %s took the place of %s.", self._model, self._swap.replaced)
            return await self.status()

    async def put_back(self) -> dict[str, Any]:
        """Put the old draft back.

        Raises:
            HTTPException: 409 if no swap is pending.
        """
        self._check_server()
        async with self._lock:
            if self._swap is None or self._swap.state != PENDING:
                raise HTTPException(
                    HTTPStatus.CONFLICT,
                    f"no swap is pending (GET {PATH}), so there is no old draft to put back.",
                )
            await self._roll_back(self._swap, "asked for")
            return await self.status()

    def count(self, step: Verifications) -> None:
        """Record the verifications of a step."""
        swap = self._swap
        if swap is None or swap.state != PENDING:
            self._latest.append(step)
            self._num_latest += step.number
            while self._num_latest - self._latest[0].number >= MOST:
                self._num_latest -= self._latest.popleft().number
            return
        swap.after += step
        is_decided = self._judgement is not None and not self._judgement.done()
        if swap.after.number >= swap.wanted and not is_decided:
            self._judgement = asyncio.get_running_loop().create_task(self._judge(swap))

    async def _judge(self, swap: Swap) -> None:
        async with self._lock:
            # It was put back, or another one is pending, while this one waited.
            if swap is not self._swap or swap.state != PENDING:
                return
            try:
                if swap.after.is_worse_than(swap.before):
                    await self._roll_back(
                        swap,
                        "it gave fewer tokens a verification, by more than "
                        f"{NUM_ERRORS:g} standard errors",
                    )
                else:
                    # The engine is not paused: no weight of the model changes.
                    await self._begin()
                    await self._send(replaced=DROP)
                    await self._engine.finish_weight_update()
                    is_compared = swap.before.number >= LEAST
                    swap.state, swap.reason = (
                        KEPT,
                        "it is not worse" if is_compared else "there was nothing to compare with",
                    )
                    self._latest = deque([swap.after])
                    self._num_latest = swap.after.number
            except Exception:
                # It is tried again with the next step that verifies.
                logger.exception("The draft %s could not be judged.", swap.model)
                return
            logger.info("The draft %s is %s: %s.", swap.model, swap.state, swap.reason)

    async def _roll_back(self, swap: Swap, reason: str) -> None:
        await self._restore()
        swap.state, swap.reason = ROLLED_BACK, reason
        self._model = swap.replaced

    def _before(self, wanted: int) -> Verifications:
        """Return the served draft's latest verifications, at least ``wanted`` if there are as many."""
        found = Verifications()
        for step in reversed(self._latest):
            if found.number >= wanted:
                break
            found += step
        return found

    async def _restore(self) -> None:
        await self._begin()
        await self._send(replaced=RESTORE)
        async with self._paused():
            await self._engine.finish_weight_update()

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
            await self._restore()
        except Exception:
            logger.info("No worker had begun to load the draft.", exc_info=True)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the engine between two passes, with every cache empty.

        Requests in flight keep their tokens, whose cache is computed anew, so that it is the new
        draft's, and no proposal of the old draft is verified afterwards.
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
        return "--api-server-count: one process must hear all counters; set it to 1."
    if engine_client.logger_manager is None:
        return "--disable-log-stats: without counters no draft can be judged; leave it out."
    return None


class _Counter(StatLoggerBase):
    """Stat logger that receives the statistics of every step, as vLLM's own loggers do."""

    def __init__(self, swaps: DraftSwaps) -> None:
        self._swaps = swaps

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        stats = getattr(scheduler_stats, "spec_decoding_stats", None)
        if stats is not None and stats.num_drafts:
            self._swaps.count(Verifications.of_step(stats))

    def record_admission_rejection(self, reason: str) -> None:
        """Ignore rejected requests, which have no draft."""

    def log_engine_initialized(self) -> None:
        """Log nothing, since vLLM's own loggers do."""
