"""Tests of the order in which waiting requests are served."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from vllm_diffusion.requests.arguments import RequestArguments, attach_arguments
from vllm_diffusion.scheduling.turns import Turns


class Waiting:
    """A waiting request, as far as a queue reads it."""

    def __init__(self, name: str, body: int = 0) -> None:
        self.structured_output_request: Any = None
        self.name = name
        self.sampling_params: Any = SimpleNamespace(extra_args=None)
        attach_arguments(self.sampling_params, RequestArguments(body=body))


def waiting(queue: Any, *requests: Waiting) -> Any:
    """Let requests wait in a queue."""
    for request in requests:
        queue.add_request(request)
    return queue


def served(queue: Any, count: int | None = None) -> str:
    """Serve some requests, or all, and return their names."""
    return "".join(queue.pop_request().name for _ in range(len(queue) if count is None else count))


def test_turns_without_bodies():
    """Requests that come alone are served in the order of arrival, as by vLLM."""
    for kind in (Turns, FCFSRequestQueue):
        assert served(waiting(kind(), *map(Waiting, "abcde"))) == "abcde"


def test_a_body_of_many():
    """Who comes after a body of many waits for one of them; two bodies take turns."""
    queue = waiting(Turns(), *(Waiting("a", 1) for _ in range(6)))
    assert served(waiting(queue, *(Waiting("b", 2) for _ in range(3)), Waiting("c")), 4) == "abca"
    assert served(waiting(queue, Waiting("d"))) == "babdaaa"


def test_a_body_gets_on():
    """A body of many is not left waiting by requests that come alone without end."""
    queue = waiting(Turns(), *(Waiting("a", 1) for _ in range(8)))
    order = ""
    for _ in range(8):
        order += served(waiting(queue, Waiting("b"), Waiting("b")), 3)
    assert order.count("a") == 8


def test_put_back():
    """A request that is put back is the next one, whatever comes meanwhile."""
    queue = waiting(Turns(), *(Waiting("a", 1) for _ in range(3)), Waiting("b"))
    first = queue.pop_request()
    queue.prepend_request(first)
    assert served(waiting(queue, Waiting("c"))) == "abaca"


def test_nothing_is_kept():
    """A queue keeps no request that was served or withdrawn, nor the number of its body."""
    queue = waiting(Turns(), *(Waiting("a", body) for body in range(1, 9)))
    queue.remove_requests(list(queue)[:4])
    served(queue)
    assert not queue._turns
    assert not queue._last


class Passes:
    """A scheduler, as far as its queue changes it."""

    def __init__(self, queue: Turns, count: int) -> None:
        self.waiting, self.running = queue, [queue.pop_request() for _ in range(count)]

    def _preempt_request(self, request: Waiting, now: float) -> None:
        self.waiting.prepend_request(request)

    def next_pass(self) -> str:
        """Return the names of what runs in the next pass, in its order."""
        self.waiting.take_turns(self)
        return "".join(request.name for request in self.running)


def many(name: str, count: int, body: int) -> list[Waiting]:
    """Make the requests of one body."""
    return [Waiting(f"{name}{i}", body) for i in range(count)]


def test_rows_go_to_each_body_first():
    """Of what runs the first of each body has rows before the second of any."""
    passes = Passes(waiting(Turns(), *many("a", 3, 1)), 3)
    passes.running += [*many("b", 2, 2), Waiting("c")]
    assert passes.next_pass() == "a0b0ca1b1a2" == passes.next_pass()


def test_the_last_of_several_gives_way():
    """One that waited for a pass is let in for the last of a body that has several, and that one
    goes on after it.
    """
    passes = Passes(waiting(Turns(), *many("a", 5, 1)), 3)
    waiting(passes.waiting, Waiting("c"))
    # It has come since the last pass, which may have had a place.
    assert passes.next_pass() == "a0a1a2"
    assert passes.next_pass() == "a0a1"
    assert served(passes.waiting) == "ca3a2a4"


def test_nobody_gives_way_to_what_cannot_run():
    """What waits for its grammar, and what has one of its body running, takes nobody's place."""
    passes = Passes(waiting(Turns(), *many("a", 4, 1)), 2)
    blocked = Waiting("c")
    blocked.structured_output_request = SimpleNamespace(is_grammar_ready=False)
    waiting(passes.waiting, blocked)
    assert passes.next_pass() == passes.next_pass() == "a0a1"
    blocked.structured_output_request.is_grammar_ready = True
    assert passes.next_pass() == "a0"


def test_one_gives_way_once():
    """A request that waits for something else than a place, as for its adapter, takes one place."""
    passes = Passes(waiting(Turns(), *many("a", 6, 1)), 4)
    waiting(passes.waiting, Waiting("c"))
    assert [passes.next_pass() for _ in range(3)] == ["a0a1a2a3", "a0a1a2", "a0a1a2"]
    # It has run, and was preempted for its memory.
    passes.running.append(passes.waiting.pop_request())
    passes.next_pass()
    passes.waiting.prepend_request(passes.running.pop(passes.running.index(passes.running[1])))
    assert passes.next_pass() == "a0a1"
