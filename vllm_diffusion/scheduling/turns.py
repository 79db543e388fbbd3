"""Turns of the bodies that clients send: the requests of one take turns with those of others.

One body may ask for thousands of answers. Served in the order of arrival, everybody else would wait
until the last of them has begun; and where all places are taken, until one of them ends.
"""

import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_diffusion.requests.arguments import arguments_of


def _body(request: Request) -> int:
    """Return the number of the body that a request came in; 0 for one that came alone."""
    return arguments_of(request.sampling_params).body


@dataclass
class _Turn:
    number: int
    # How many requests had come when it came.
    arrival: int
    # It was let in and has not run since: it does not wait for another's place.
    is_let_in: bool = False


class Turns(FCFSRequestQueue):
    """vLLM's queue, in which a request waits for one request of each other body, and not for all.

    Each request has a turn, and those of a turn are served in the order of arrival. The requests of
    a body have turns one after another, the first from the turn that is served now. So a request
    that comes alone waits for one of each body that is there, and a body gets on however many come
    alone.

    Source: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), every packet as long.
    """

    def __init__(self) -> None:
        super().__init__()
        # The latest turn that was served, and how many requests have come: now, and when the last
        # pass was scheduled.
        self._served = self._num_come = self._num_seen = 0
        self._turns: WeakKeyDictionary[Request, _Turn] = WeakKeyDictionary()
        # The latest turn of each body, as long as the request is somewhere that has it.
        self._last: WeakValueDictionary[int, _Turn] = WeakValueDictionary()

    def add_request(self, request: Request) -> None:
        self._num_come += 1
        turn, body = _Turn(self._served + 1, self._num_come), _body(request)
        # One that gives way has the next turn, before what its body has waiting.
        if body and request not in self._turns:
            if (last := self._last.get(body)) is not None:
                turn.number = max(turn.number, last.number + 1)
            self._last[body] = turn
        self._turns[request] = turn
        # What was put back had its turn: it stands before all that come.
        self.insert(bisect_right(self, turn.number, key=self._number), request)

    def pop_request(self) -> Request:
        request = super().pop_request()
        self._served = max(self._served, self._number(request))
        return request

    def _number(self, request: Request) -> int:
        return self._turns[request].number

    def take_turns(self, scheduler: Scheduler) -> None:
        """Put in order what runs, and let in who waited for a place or memory in the last pass.

        Requests that run get rows in their order as long as a pass has any: the first of each body
        goes before the second of any. Where one of a body that has none running waits and has the
        next turn, the last of a body that has several gives way.

        Args:
            scheduler: The scheduler of this queue, about to schedule a pass.
        """
        num_seen, self._num_seen = self._num_seen, self._num_come
        running, num_running = scheduler.running, Counter[int]()
        places = {}
        for request in running:
            body = _body(request)
            places[request] = num_running[body]
            num_running[body] += body > 0
            if (turn := self._turns.get(request)) is not None:
                turn.is_let_in = False
        running.sort(key=places.__getitem__)
        if not running or places[running[-1]] == 0:
            return
        for request in self:
            turn, constraint = self._turns[request], request.structured_output_request
            if turn.number > self._served + 1:
                return
            # Without its grammar it would leave the place to the next one.
            is_ready = constraint is None or constraint.is_grammar_ready
            waits = is_ready and turn.arrival <= num_seen and not turn.is_let_in
            if waits and not num_running[_body(request)]:
                turn.is_let_in = True
                self.remove(request)
                give_way(scheduler, running[-1])
                self.appendleft(request)
                return


def give_way(scheduler: Scheduler, request: Request) -> None:
    """Preempt a running request in favour of those that wait; its tokens are the same later."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    # The stock code puts it before the waiting requests.
    scheduler.waiting.remove_request(request)
    scheduler.waiting.add_request(request)
