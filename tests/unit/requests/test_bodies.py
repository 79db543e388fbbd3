"""Bodies that hold too much, stop or come at once, refusals that must arrive, bad connections."""

import asyncio
import base64
import http.client
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import garbage

from vllm_diffusion.requests import bodies, bounds
from vllm_diffusion.requests.http import BoundedBodies, _num_parts, _open_sending

pytestmark = pytest.mark.engine

MOST = 400_000


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (await receive())["body"]})


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> BoundedBodies:
    """Return the middleware, for which a client that stops for a moment has stopped."""
    monkeypatch.setenv("VLLM_HTTP_MAX_REQUEST_BODY_SIZE", str(MOST))
    monkeypatch.setattr(bodies, "_LONGEST_PAUSE", 0.2)
    return BoundedBodies(app)


class Upload:
    """A request whose pieces are sent one by one by a test."""

    def __init__(self, door: BoundedBodies, kind: str = "", declared: int | None = None) -> None:
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []
        headers = {"content-type": kind}
        headers |= {} if declared is None else {"content-length": str(declared)}
        scope = {"type": "http", "path": "/v1/completions"}
        scope["headers"] = [(k.encode(), v.encode()) for k, v in headers.items()]
        self.served = asyncio.ensure_future(door(scope, self._pieces.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def put(self, piece: bytes, *, more: bool) -> None:
        """Send a piece, and let the server read it."""
        self._pieces.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


PICTURE = base64.b64encode(bytes(MOST // 2))
LIMIT, MOST_KEYS = bounds.MOST_OBJECTS, bounds.MOST_KEYS
MANY_KEYS = dict.fromkeys(range(MOST_KEYS + 1), 1)
JSON, FORM = "application/json", "multipart/form-data; boundary=a"
LONG = "VLLM_HTTP_MAX_REQUEST_BODY_SIZE"
PARTS = f"objects and lists; the limit is {LIMIT}"
KEYS = f"{MOST_KEYS + 1} keys; the limit is {MOST_KEYS}"
# A body, its type, the server's limit in bytes, and what a refusal says.
BODIES: dict[str, tuple[bytes, str, int, str | None]] = {
    "empty": (b"", "", MOST, None),
    "longest text": (b"x" * (MOST // 4), "", MOST, None),
    "longer text": (b"x" * (MOST // 4 + 1), "", MOST, LONG),
    "a picture": (b'{"url": "data:image/png;base64,' + PICTURE + b'"}', "", MOST, None),
    "Anthropic's": (b'{"source": {"type": "base64", "data": "' + PICTURE + b'"}}', "", MOST, None),
    "no picture": (b'{"text": "' + PICTURE + b'"}', "", MOST, LONG),
    "the most": (b'{"messages": [' + b"{}," * (LIMIT - 3) + b"{}]}", JSON, 2**25, None),
    "one more": (b'{"messages": [' + b"{}," * (LIMIT - 2) + b"{}]}", JSON, 2**25, PARTS),
    "UTF-16": (json.dumps({"a": [{}] * LIMIT}).encode("utf-16"), JSON, 2**25, PARTS),
    "token ids": (json.dumps({"prompt": [*range(131_072)]}).encode(), JSON, 2**25, None),
    "a form": (b"{[" * LIMIT, FORM, 2**25, None),
    "the most keys": (json.dumps(dict.fromkeys(range(MOST_KEYS), 1)).encode(), "", 2**25, None),
    "one more key": (json.dumps(MANY_KEYS).encode(), "", 2**25, KEYS),
}


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str, is_declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is refused by its length without pictures, or by the number of its objects, lists or
    keys and not by that of its values; or else it arrives byte by byte.
    """
    body, kind, most, refusal = BODIES[name]
    monkeypatch.setenv("VLLM_HTTP_MAX_REQUEST_BODY_SIZE", str(most))

    async def ask() -> Upload:
        upload = Upload(BoundedBodies(app), kind, len(body) if is_declared else None)
        for i in range(0, len(body), 2**16):
            await upload.put(body[i : i + 2**16], more=True)
        await upload.put(b"", more=False)
        await upload.served
        return upload

    upload = asyncio.run(ask())
    if refusal is None:
        assert (upload.status, upload.body) == (200, body)
        return
    assert upload.status == 413
    error = json.loads(upload.body)["error"]
    assert error["param"] == "body"
    assert refusal in error["message"]


def test_a_declared_length_beyond_the_limit_is_not_read(door: BoundedBodies) -> None:
    """A body with too large a declared length is refused before its first piece."""

    async def ask() -> None:
        upload = Upload(door, declared=10**12)
        while not upload.sent:
            await asyncio.sleep(0)
        assert upload.status == 413
        await upload.put(b"x", more=False)
        await upload.served

    asyncio.run(ask())


@given(
    st.recursive(
        st.text(st.sampled_from('a[]{}"\\/,: \u227b')) | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('ab[{:"\\'), inner),
    ),
    st.booleans(),
)
def test_parts_are_counted_exactly(value: Any, is_ascii: bool) -> None:
    """The numbers of objects, lists and keys are those of the value which Python reads."""

    def count(part: Any) -> tuple[int, int]:
        if not isinstance(part, (dict, list)):
            return 0, 0
        inner = [*map(count, part.values() if isinstance(part, dict) else part)]
        num_keys = len(part) if isinstance(part, dict) else 0
        return 1 + sum(n for n, _ in inner), num_keys + sum(n for _, n in inner)

    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MOST_OBJECTS", 0)
        patch.setattr(bounds, "MOST_KEYS", 0)
        expected = count(value)
        # Without a bracket there is nothing to look for, and colons are within text.
        assert _num_parts(body) == expected if expected[0] else _num_parts(body)[0] == 0


def test_unfinished_bodies_are_bounded_together(door: BoundedBodies) -> None:
    """Bodies that come at once are kept up to a bound; what frees room lets others pass."""

    async def ask() -> None:
        held = [Upload(door) for _ in range(5)]
        for upload in held:
            await upload.put(b"x" * (MOST - 1000), more=True)
        assert [upload.status for upload in held] == [None] * 4 + [503]
        assert held[4].headers[b"retry-after"] == b"5"
        assert "holds at most 1600000 bytes" in json.loads(held[4].body)["error"]["message"]
        # Ordinary requests have their room, and that of a body which has ended is free again.
        small = Upload(door)
        await small.put(b" " * 60_000, more=True)
        await held[0].put(b"", more=False)
        large = Upload(door)
        await large.put(b";base64," + b"x" * (MOST - 70_000), more=True)
        for upload in (small, large):
            await upload.put(b"", more=False)
            await upload.served
            assert upload.status == 200
        for upload in held:
            upload.served.cancel()
        await asyncio.gather(*(upload.served for upload in held), return_exceptions=True)
        assert door._reader._num_kept == 0

    asyncio.run(ask())


@pytest.mark.parametrize("longest", [300.0, 0.1], ids=["a pause", "too slow"])
def test_a_body_must_end(
    longest: float, door: BoundedBodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that stops, or does not end, is a 408 and leaves nothing behind."""
    monkeypatch.setattr(bodies, "_LONGEST", longest)

    async def ask() -> None:
        upload = Upload(door)
        while not upload.served.done():
            await upload.put(b"x", more=True)
            await asyncio.sleep(0.01 if longest == 0.1 else 0.3)
        assert upload.status == 408
        assert upload.headers[b"connection"] == b"close"
        assert json.loads(upload.body)["error"]["param"] == "body"
        assert door._reader._num_kept == 0

    asyncio.run(ask())


def test_a_client_that_leaves_is_not_served(door: BoundedBodies) -> None:
    """What a client sent before it left is not a body, and nothing is made of it."""

    async def ask() -> None:
        upload = Upload(door)
        await upload.put(b"{", more=True)
        upload._pieces.put_nowait({"type": "http.disconnect"})
        await upload.served
        assert not upload.sent

    asyncio.run(ask())


@contextmanager
def serving(door: BoundedBodies) -> Iterator[int]:
    """Serve the middleware on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(door, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_refusal_arrives(is_chunked: bool, door: BoundedBodies) -> None:
    """A client that sends its whole body before it reads gets the 413, not a reset connection."""
    with serving(door) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        piece, num_pieces = b"x" * 100_000, 400
        headers = {"Connection": "close"}
        if not is_chunked:
            headers["Content-Length"] = str(len(piece) * num_pieces)
        body = (piece for _ in range(num_pieces))
        connection.request("POST", "/p", body, headers, encode_chunked=is_chunked)
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["param"] == "body"


def test_large_messages_without_descriptors() -> None:
    """The first large message to the engine is sent where clients have all descriptors."""
    garbage.gc.stop()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as sender,
        context.socket(zmq.PAIR) as receiver,
    ):
        receiver.bind("inproc://engine")
        sender.connect("inproc://engine")
        _open_sending()
        # Else pyzmq ends this process now.
        assert garbage.gc.is_alive()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            sender.send(bytes(10**6), copy=False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(receiver.recv()) == 10**6
