"""The settings of PyTorch's CUDA caching allocator: what `PYTORCH_ALLOC_CONF` may say.

Constants and defaults: `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h`
(torch 2.13). All sizes are bytes; the `*_mb` keys count MiB, as in torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from llmem.errors import LlmemError

MIB = 1 << 20
MIN_BLOCK = 512  # kMinBlockSize: every block is a multiple of it
SMALL_SIZE = 1 * MIB  # kSmallSize: rounded requests up to it live in the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: segment (and expandable page) of the small pool
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: below it, requests share a large segment
ROUND_LARGE = 2 * MIB  # kRoundLarge: segments for bigger requests are multiples of it
LARGE_SEGMENT = 20 * MIB  # default of large_segment_size_mb (a constant before torch 2.10)

# roundup_power2_divisions has one entry per power of two from 1 MiB to 64 GiB.
DIVISION_INTERVALS = 16

# Keys that torch accepts and that change no byte of device memory.
_WITHOUT_EFFECT = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)


@dataclass(frozen=True)
class AllocConf:
    """Allocator settings, in bytes. `AllocConf()` is what torch does when nothing is set.

    `per_process_memory_fraction` below 1 caps reserved memory at that share of the device.
    `garbage_collection_threshold` acts, as in torch, only while such a cap is set.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = LARGE_SEGMENT
    per_process_memory_fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> AllocConf:
        """Reads the string that `PYTORCH_ALLOC_CONF` takes, e.g.
        `"expandable_segments:True,max_split_size_mb:128"`.

        Raises LlmemError on what torch rejects, and on another backend than `native`.
        """
        conf = cls()
        for key, value in _pairs(text):
            conf = _set(conf, key, value)
        return conf

    def round_size(self, nbytes: int) -> int:
        """The block size, in bytes, that serves a request of `nbytes` > 0 bytes."""
        if nbytes > MIN_BLOCK:
            divisions = self.roundup_power2_divisions[_interval(nbytes)]
            if divisions > 1 and nbytes > MIN_BLOCK * divisions:
                return _next_division(nbytes, divisions)
        return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)

    def segment_size(self, size: int) -> int:
        """What cudaMalloc is asked for when no cached block fits a block of `size` bytes."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def page_size(self, small: bool) -> int:
        """Physical page, in bytes, by which an expandable segment grows."""
        return SMALL_SEGMENT if small else self.large_segment_size


def _interval(nbytes: int) -> int:
    return min(max(nbytes.bit_length() - 1 - 20, 0), DIVISION_INTERVALS - 1)


def _next_division(nbytes: int, divisions: int) -> int:
    """The next of `divisions` equal steps between two powers of two; powers stay."""
    floor = 1 << (nbytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if nbytes == floor:
        return nbytes
    return -(-nbytes // step) * step if step else floor << 1


def _pairs(text: str) -> list[tuple[str, str]]:
    """Splits `k:v,k:[a:b,c:d]` at the commas outside brackets."""
    compact = re.sub(r"\s", "", text)
    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", compact)
    pairs = [part.partition(":") for part in parts]
    for key, colon, value in pairs:
        if not (key and colon and value):
            raise LlmemError(
                f"allocator settings {text!r}: expected key:value at {key!r}; "
                "write them as PYTORCH_ALLOC_CONF does."
            )
    return [(key, value) for key, _, value in pairs]


def _set(conf: AllocConf, key: str, value: str) -> AllocConf:
    if key == "expandable_segments":
        return replace(conf, expandable_segments=_boolean(key, value))
    if key == "max_split_size_mb":
        mib = _number(key, value, least=LARGE_SEGMENT // MIB)
        return replace(conf, max_split_size=mib * MIB)
    if key == "max_non_split_rounding_mb":
        mib = _number(key, value, least=LARGE_SEGMENT // MIB)
        return replace(conf, max_non_split_rounding=mib * MIB)
    if key == "large_segment_size_mb":
        mib = _number(key, value, least=MIN_LARGE_ALLOC // MIB + 1)
        return replace(conf, large_segment_size=mib * MIB)
    if key == "roundup_power2_divisions":
        return replace(conf, roundup_power2_divisions=_divisions(value))
    if key == "garbage_collection_threshold":
        return replace(conf, garbage_collection_threshold=_fraction(key, value, below_one=True))
    if key == "per_process_memory_fraction":
        return replace(conf, per_process_memory_fraction=_fraction(key, value, below_one=False))
    if key == "backend":
        if value != "native":
            raise LlmemError(
                f"allocator backend {value!r} is the driver's own and is not modelled; "
                "use backend:native."
            )
        return conf
    if key in _WITHOUT_EFFECT:
        return conf
    raise LlmemError(
        f"allocator setting {key!r} is unknown; PYTORCH_ALLOC_CONF knows expandable_segments, "
        "max_split_size_mb, max_non_split_rounding_mb, large_segment_size_mb, "
        "roundup_power2_divisions, garbage_collection_threshold, per_process_memory_fraction."
    )


def _boolean(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise LlmemError(f"allocator setting {key}:{value} must be True or False.")
    return value == "True"


def _number(key: str, value: str, least: int = 0) -> int:
    if not value.isdecimal() or int(value) < least:
        raise LlmemError(f"allocator setting {key}:{value} must be a whole number >= {least}.")
    return int(value)


def _fraction(key: str, value: str, below_one: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not (0.0 < number < 1.0 or (number == 1.0 and not below_one)):
        raise LlmemError(f"allocator setting {key}:{value} must be a number between 0 and 1.")
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """`4` for every size, or `[256:1,512:2,>:4]`: from 256 MiB 1, from 512 MiB 2, above 4.

    The first value also holds below its boundary and `>` above the last one; an interval
    that the list skips keeps 0 (plain 512-byte rounding), as in torch.
    """
    key = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_two(key, value, zero=False),) * DIVISION_INTERVALS
    table = [0] * DIVISION_INTERVALS
    last = -1
    for item in value.strip("[]").split(","):
        boundary, _, text = item.partition(":")
        divisions = _power_of_two(key, text, zero=True)
        if boundary == ">":
            table[last + 1 :] = [divisions] * (DIVISION_INTERVALS - last - 1)
            continue
        mib = _power_of_two(key, boundary, zero=False)
        index = min(mib.bit_length() - 1, DIVISION_INTERVALS - 1)
        if last < 0:
            table[:index] = [divisions] * index
        table[index] = divisions
        last = index
    return tuple(table)


def _power_of_two(key: str, value: str, zero: bool) -> int:
    number = _number(key, value)
    if number & (number - 1) or (number == 0 and not zero):
        raise LlmemError(f"allocator setting {key}: {value} must be a power of two.")
    return number
