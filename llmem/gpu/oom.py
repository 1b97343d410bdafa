"""Out of memory: the error of the allocator, with the fields of torch's message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmem.gpu.allocator import CachingAllocator


class OutOfMemory(MemoryError):
    """No memory for a request, even after returning every cached block. Fields are bytes.

    `requested` is what was asked for, `alloc_size` what the driver would have been asked for
    (the figure in torch's message), `allocated` and `reserved` the state at that moment,
    `retries` how often cached blocks had to be freed so far.
    """

    def __init__(
        self, message: str, *, requested: int, alloc_size: int, allocated: int, reserved: int,
        capacity: int, retries: int,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.requested = requested
        self.alloc_size = alloc_size
        self.allocated = allocated
        self.reserved = reserved
        self.capacity = capacity
        self.retries = retries


def out_of_memory(allocator: CachingAllocator, size: int, nbytes: int) -> OutOfMemory:
    """The error for a request of `nbytes` bytes that needs a block of `size` bytes."""
    reserved, allocated = allocator.reserved, allocator.allocated
    limits = [limit for limit in (allocator.capacity, allocator.allowed) if limit is not None]
    capacity = min(limits)
    device = allocator.device_total if allocator.device_total is not None else capacity
    device_free = max((allocator.capacity or device) - reserved, 0)
    alloc_size = allocator.conf.segment_size(size)
    allowed = f"{format_size(allocator.allowed)} allowed; " if allocator.allowed is not None else ""
    message = (
        f"CUDA out of memory. Tried to allocate {format_size(alloc_size)}. GPU 0 has a total "
        f"capacity of {format_size(device)} of which {format_size(device_free)} is free. "
        f"Including non-PyTorch memory, this process has {format_size(device - device_free)} "
        f"memory in use. {allowed}Of the allocated memory {format_size(allocated)} is allocated "
        f"by PyTorch, and {format_size(reserved - allocated)} is reserved by PyTorch but "
        "unallocated."
    )
    return OutOfMemory(
        message, requested=nbytes, alloc_size=alloc_size, allocated=allocated,
        reserved=reserved, capacity=capacity, retries=allocator.num_alloc_retries,
    )  # fmt: skip


def format_size(nbytes: int) -> str:
    """Bytes as torch's messages write them (c10 `format_size`)."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes > unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
