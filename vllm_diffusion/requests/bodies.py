"""Reading of a request's body: how much is kept at once, and how long a client may take.

uvicorn gives what has come as it comes, and waits for the rest without end.
"""

import asyncio
import contextlib
import time
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

# Number of the body that the requests being made come from; 0 without a body. Requests of one body
# take turns with those of others (scheduling/turns.py).
body_number: ContextVar[int] = ContextVar("body_number", default=0)

# Seconds without a byte of a body, and until the whole of one.
_LONGEST_PAUSE, _LONGEST = 30.0, 300.0
# Limit for reading the rest of a body that was refused.
_LONGEST_REST = 30.0
# Bodies of the most bytes that are kept at once, and what each has kept whatever others have: as
# many bytes as uvicorn itself keeps of one that nobody reads.
_NUM_LONGEST, _ALWAYS_KEPT = 4, 65_536


class BodyError(Exception):
    """A body that is not served.

    Args:
        is_whole: Whether all of it has been read.

    Attributes:
        status: Status of the answer.
        headers: Headers of the answer, besides those of every answer.
        discards: True if the rest of the body is read before the connection ends.
    """

    def __init__(self, status: HTTPStatus, message: str, *, is_whole: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if is_whole else {"connection": "close"}
        self.discards = not is_whole and status != HTTPStatus.REQUEST_TIMEOUT
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.headers["retry-after"] = "5"


class BodyReader:
    """A reader of bodies, which keeps a bounded number of bytes of all that are unfinished.

    Args:
        most: Bytes of the longest body.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_kept = 0

    async def read(self, receive: Any) -> bytes | None:
        """Read a body.

        Returns:
            The body, or as much of it as shows that it is too long; ``None`` if its client has
            left.

        Raises:
            BodyError: 408 if it is not sent in time, 503 if others leave it no room.
        """
        body, more, end = bytearray(), True, time.monotonic() + _LONGEST
        try:
            while more and len(body) <= self._most:
                message = await self._next(receive, end)
                if message["type"] == "http.disconnect":
                    return None
                piece = message.get("body", b"")
                body += piece
                self._num_kept += len(piece)
                self._check_room(len(body))
                more = message.get("more_body", False)
            return bytes(body)
        finally:
            self._num_kept -= len(body)

    async def _next(self, receive: Any, end: float) -> Any:
        try:
            async with asyncio.timeout(min(_LONGEST_PAUSE, end - time.monotonic())):
                return await receive()
        except TimeoutError:
            raise BodyError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The body did not arrive in time: at most {_LONGEST_PAUSE:.0f} s may pass without a byte, and "
                f"{_LONGEST:.0f} s in all. Send it again.",
            ) from None

    def _check_room(self, length: int) -> None:
        most = _NUM_LONGEST * self._most
        if self._num_kept > most and length > _ALWAYS_KEPT:
            raise BodyError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"The server is busy reading other bodies, of which it holds at most {most} bytes at once. Send this one "
                "again later, or fewer at a time.",
            )


def discarding(receive: Any, send: Any) -> Any:
    """Have the rest of a body read between its answer and the end of its connection, and nothing
    of it kept.

    A connection that is closed before is reset, and many clients then never read their answer.
    """

    async def send_and_discard(message: Any) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_REST):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_and_discard
