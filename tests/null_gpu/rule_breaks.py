"""Programs that break one of CUDA's rules each, in plain torch, run on the null GPU by ``test_rules.py``.

A function raises what CUDA makes of it, or returns what was there. ``keeps_every_rule`` does all of it as CUDA asks
for, so that a null GPU which refuses everything fails too.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.null_gpu.counts import counts_of, summary

N = 1 << 20


def device_tensor() -> torch.Tensor:
    return torch.zeros(N, device="cuda")


@contextmanager
def capture(mode: str = "global") -> Any:
    """A capture of a side stream, as torch makes one; its graph comes out."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        yield graph


def keeps_every_rule() -> dict[str, int]:
    """Copies, a forked and joined stream in a capture, events, replays; what they ask of the driver."""
    x = device_tensor()
    pinned = torch.ones(N).pin_memory()
    side = torch.cuda.Stream()
    inside, after = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)

    def work() -> None:
        with capture() as graph:
            y = x + 1
            inside.record()
            side.wait_event(inside)
            with torch.cuda.stream(side):
                z = x * 2
            torch.cuda.current_stream().wait_stream(side)
            x.copy_(y + z)
        graph.replay()
        graph.replay()
        x.copy_(pinned, non_blocking=True)
        after.record()
        after.synchronize()
        assert x.sum().item() == 0.0  # kernels do nothing
        torch.cuda.synchronize()

    found = summary(counts_of(work))
    assert x.cpu().tolist()[:2] == [1.0, 1.0]  # and copies do
    return {kind: n for kind, n in found.items() if n}


# ---- what a capture forbids


def waits_for_its_stream() -> None:
    x = device_tensor()
    with capture():
        x.add_(1)
        torch.cuda.current_stream().synchronize()


def waits_for_the_device() -> None:
    with capture():
        torch.cuda.synchronize()


def reads_a_value() -> None:
    x = device_tensor()
    with capture():
        x.sum().item()


def allocates_in_a_capture() -> None:
    """Past torch's allocator, which relaxes the rule for itself."""
    with capture():
        ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), N)


def waits_in_another_thread() -> None:
    """A capture in global mode forbids it to every thread."""
    with capture():
        waiting = threading.Thread(target=torch.cuda.synchronize)
        waiting.start()
        waiting.join()


def waits_in_another_thread_of_a_local_capture() -> str:
    """One in thread-local mode to its own."""
    x = device_tensor()
    with capture("thread_local"):
        x.add_(1)
        waiting = threading.Thread(target=torch.cuda.synchronize)
        waiting.start()
        waiting.join()
    return "captured"


def copies_from_pageable_memory_in_a_capture() -> None:
    x, host = device_tensor(), torch.ones(N)
    with capture():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        ctypes.CDLL("libcudart.so.13").cudaMemcpyAsync(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(host.data_ptr()),
            ctypes.c_size_t(64),
            1,
            stream,
        )


def uses_the_default_stream_beside_a_blocking_one() -> None:
    """A blocking stream is one that the default stream waits for; torch makes none."""
    x = device_tensor()
    library = ctypes.CDLL("libcudart.so.13")
    stream = ctypes.c_void_p()
    library.cudaStreamCreate(ctypes.byref(stream))
    library.cudaStreamBeginCapture(stream, 0)
    x.add_(1)


# ---- streams and events


def leaves_a_stream_unjoined() -> None:
    x, side = device_tensor(), torch.cuda.Stream()
    with capture():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)


def waits_for_an_event_from_outside() -> None:
    x, event = device_tensor(), torch.cuda.Event()
    event.record()
    with capture():
        torch.cuda.current_stream().wait_event(event)
        x.add_(1)


def waits_for_an_event_of_a_capture() -> None:
    x, event = device_tensor(), torch.cuda.Event()
    with capture():
        x.add_(1)
        event.record()
        event.synchronize()


def waits_for_an_event_after_its_capture() -> None:
    x, event = device_tensor(), torch.cuda.Event()
    with capture():
        x.add_(1)
        event.record()
    torch.cuda.current_stream().wait_event(event)


def asks_for_an_event_during_a_capture() -> None:
    event = torch.cuda.Event()
    event.record()
    with capture():
        event.query()


def times_events_that_were_not_recorded() -> None:
    event = _event()
    _call("cudaEventElapsedTime", ctypes.byref(ctypes.c_float()), event, event)


def ends_a_capture_in_another_thread() -> None:
    x, graph = device_tensor(), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    raised: list[BaseException] = []

    def end() -> None:
        try:
            with torch.cuda.stream(stream):
                graph.capture_end()
        except RuntimeError as error:
            raised.append(error)

    with torch.cuda.stream(stream):
        graph.capture_begin()
        x.add_(1)
        ending = threading.Thread(target=end)
        ending.start()
        ending.join()
    raise raised[0]


def _call(name: str, *arguments: Any) -> None:
    """A function of the runtime, past torch."""
    torch.cuda.check_error(getattr(ctypes.CDLL("libcudart.so.13"), name)(*arguments))


def _stream() -> ctypes.c_void_p:
    torch.cuda.init()
    stream = ctypes.c_void_p()
    non_blocking = ctypes.c_uint(1)
    _call("cudaStreamCreateWithFlags", ctypes.byref(stream), non_blocking)
    return stream


def _event() -> ctypes.c_void_p:
    event = ctypes.c_void_p()
    _call("cudaEventCreate", ctypes.byref(event))
    return event


def merges_two_captures() -> None:
    """A stream of one capture waits for an event of another."""
    first, second, event = _stream(), _stream(), _event()
    for stream in (first, second):
        _call("cudaStreamBeginCapture", stream, 0)
    _call("cudaEventRecord", event, first)
    _call("cudaStreamWaitEvent", second, event, 0)


def ends_a_capture_on_another_stream() -> None:
    first, second, event, graph = _stream(), _stream(), _event(), ctypes.c_void_p()
    _call("cudaStreamBeginCapture", first, 0)
    _call("cudaEventRecord", event, first)
    _call("cudaStreamWaitEvent", second, event, 0)
    _call("cudaStreamEndCapture", second, ctypes.byref(graph))


def records_on_a_destroyed_stream() -> None:
    stream, event = _stream(), _event()
    _call("cudaStreamDestroy", stream)
    _call("cudaEventRecord", event, stream)


def waits_for_a_destroyed_event() -> None:
    event = _event()
    _call("cudaEventDestroy", event)
    _call("cudaStreamWaitEvent", _stream(), event, 0)


# ---- launches


def _launch(grid: tuple[int, int, int], block: tuple[int, int, int], shared: int = 0) -> None:
    class Dim3(ctypes.Structure):
        _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    torch.cuda.init()
    library = ctypes.CDLL("libcudart.so.13")
    library.null_gpu_function.restype = ctypes.c_void_p
    function = ctypes.c_void_p(library.null_gpu_function(b"some_kernel"))
    error = library.cudaLaunchKernel(
        function, Dim3(*grid), Dim3(*block), None, ctypes.c_size_t(shared), None
    )
    torch.cuda.check_error(error)


def launches_too_many_threads() -> None:
    _launch((1, 1, 1), (2048, 1, 1))


def launches_too_deep_a_block() -> None:
    _launch((1, 1, 1), (1, 1, 128))


def launches_too_tall_a_grid() -> None:
    _launch((1, 65536, 1), (32, 1, 1))


def launches_an_empty_grid() -> None:
    _launch((0, 1, 1), (32, 1, 1))


def launches_with_unasked_shared_memory() -> None:
    """More than 48 KiB have to be asked for first."""
    _launch((1, 1, 1), (32, 1, 1), 65536)


def launches_a_triton_kernel_of_128_kib_of_shared_memory() -> None:
    _square(device_tensor(), 256)


def launches_a_triton_kernel_on_a_host_tensor() -> None:
    _square(torch.zeros(N), 32)


def _square(x: torch.Tensor, block: int) -> None:
    from tests.null_gpu.rule_kernels import square

    square[(1,)](x.half(), block, num_warps=8)


# ---- memory


def _memcpy(target: int, source: int, size: int, kind: int) -> None:
    error = ctypes.CDLL("libcudart.so.13").cudaMemcpy(
        ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), kind
    )
    torch.cuda.check_error(error)


def copies_from_freed_memory() -> None:
    x = torch.zeros(64 * N, device="cuda")
    address = x.data_ptr()
    del x
    torch.cuda.empty_cache()
    _memcpy(torch.zeros(N).data_ptr(), address, 64, 2)


def copies_past_the_end() -> None:
    x = torch.zeros(64 * N, device="cuda")
    _memcpy(torch.zeros(1).data_ptr(), x.data_ptr() + 256 * N - 32, 64, 2)


def copies_to_the_device_at_a_host_address() -> None:
    torch.cuda.init()
    x, y = torch.zeros(N), torch.zeros(N)
    _memcpy(x.data_ptr(), y.data_ptr(), 64, 1)


def frees_twice() -> None:
    torch.cuda.init()
    library, pointer = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    torch.cuda.check_error(library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(N)))
    torch.cuda.check_error(library.cudaFree(pointer))
    torch.cuda.check_error(library.cudaFree(pointer))


def replays_over_freed_memory() -> None:
    x, y = torch.zeros(64 * N, device="cuda"), torch.zeros(64 * N, device="cuda")
    with capture() as graph:
        y.copy_(x)
    del x, y
    torch.cuda.empty_cache()
    graph.replay()


def takes_more_memory_than_there_is() -> None:
    held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(3)]
    raise AssertionError(len(held))


def takes_what_there_is() -> list[int]:
    """Free memory before, with a GiB taken, and after it is given back, in MiB."""
    free = [torch.cuda.mem_get_info()[0]]
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    free.append(torch.cuda.mem_get_info()[0])
    del x
    torch.cuda.empty_cache()
    free.append(torch.cuda.mem_get_info()[0])
    return [number >> 20 for number in free]


def copies_what_nothing_has_filled() -> dict[str, Any]:
    """MiB of this machine that a copy of untouched memory takes, and whether one of filled memory is exact."""
    source, target = (torch.empty(256 * N, dtype=torch.uint8, device="cuda") for _ in range(2))
    before = _resident_mib()
    target.copy_(source)
    grown = _resident_mib() - before
    size = 3 * N + 17
    on_host = torch.zeros(size, dtype=torch.uint8)
    # Within pages and over their ends, with whole pages of zeros between.
    on_host[5:N], on_host[2 * N - 3 : 2 * N + 4], on_host[-1] = 1, 2, 3
    target[9 : 9 + size].copy_(torch.full((size,), 7, dtype=torch.uint8))
    source[3 : 3 + size].copy_(on_host)
    target[9 : 9 + size].copy_(source[3 : 3 + size])
    return {"grown": grown, "exact": torch.equal(target[9 : 9 + size].cpu(), on_host)}


def _resident_mib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


# ---- waits and copies that are counted


def counted(name: str) -> dict[str, int]:
    """What one call asks of the driver, by kind; kinds that it did not ask for left out."""
    x, pinned, pageable = device_tensor(), torch.zeros(N).pin_memory(), torch.zeros(N)
    event = torch.cuda.Event()
    event.record()
    calls: dict[str, Callable[[], object]] = {
        "value": lambda: x[0].item(),
        "pageable": lambda: x.copy_(pageable),
        "pageable, without waiting": lambda: x.copy_(pageable, non_blocking=True),
        "pinned": lambda: x.copy_(pinned, non_blocking=True),
        "index": lambda: x[torch.tensor([1, 2])],
        "mask": lambda: x[x > 0],
        "event": event.synchronize,
        "stream": torch.cuda.current_stream().synchronize,
        "device": torch.cuda.synchronize,
    }
    # What is allocated, the first time, is not what a call costs.
    calls[name]()
    return {kind: n for kind, n in summary(counts_of(calls[name])).items() if n}


# ---- processes


def forks_after_it_used_the_gpu() -> str:
    """The child's error."""
    device_tensor()
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            # Past torch, which has a check of its own.
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            error = ctypes.CDLL("libcudart.so.13").cudaMemGetInfo(
                ctypes.byref(free), ctypes.byref(total)
            )
            torch.cuda.check_error(error)
        except RuntimeError as error:
            os.write(writable, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(readable, 4096).decode()


def has_no_code_for_the_device() -> None:
    """A module for another chip."""
    torch.cuda.init()
    # The head of an ELF file for sm_80, whose machine code no later generation runs.
    image = bytearray(b"\x7fELF") + bytes(44) + (80).to_bytes(4, "little") + bytes(16)
    module = ctypes.c_void_p()
    error = ctypes.CDLL("libcuda.so.1").cuModuleLoadData(ctypes.byref(module), bytes(image))
    torch.cuda.check_error(error)


def chosen_image(images: list[tuple[int, int]]) -> int:
    """The chip of the image that the device runs, of a library of nvcc's; each is a kind (1 PTX, 2 machine code) and a chip."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0, 32, 0, 0, 0, 0, 0, chip) for kind, chip in images
    )
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    return ctypes.CDLL("libcudart.so.13").null_gpu_chosen_image(container)


def sums() -> None:
    torch.cumsum(device_tensor(), 0)
    torch.sort(device_tensor())
