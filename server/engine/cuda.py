"""The bundle of one NVIDIA GPU: its current stream, its free memory, its graphs.

The only module of the engine that calls torch.cuda; knows no batches.
"""

from __future__ import annotations

import gc

import torch

from server.engine.accelerator import Accelerator
from server.engine.decode_graphs import Work
from server.engine.stream import Mark, StagedStream


def cuda_accelerator(device: torch.device, can_record: bool) -> Accelerator:
    """can_record: nothing that the operations do waits for the host."""
    return Accelerator(CudaStream(device), CudaMeter(device), CudaCapture() if can_record else None)


class CudaStream(StagedStream):
    """The current stream; copies from pinned memory pass the host by."""

    pinned = True

    def mark(self) -> Mark:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0])

    def trim(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class CudaCapture:
    """CUDA graphs over one pool of memory: no two of them run at a time, and what they leave is copied out.

    On a stream of its own: where a graph dies, torch frees what libraries use on its stream, and live graphs that were
    recorded there use that too (pytorch#193402).
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """Run once, so that kernels are compiled and libraries have their handles; then record.

        Work in which the host takes part cannot be recorded, and is given back as it is.
        """
        work()
        if waits(work):
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


def waits(work: Work) -> bool:
    """Whether the host waits for the device in it; it runs up to that place."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False
