"""Memory that is freed is kept for the next step.

A training step frees and asks for the same large tensors again. By default glibc gives such
blocks back to the system, and every step pays for them with page faults, which on a CPU cost
more than the arithmetic.
"""

from __future__ import annotations

import ctypes

# of malloc.h; glibc takes no threshold above 32 MiB on 64-bit systems
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MMAP_THRESHOLD = 32 << 20
_KEEP = 1 << 30


def keep_memory() -> bool:
    """Tell this process's allocator, once; False where it is not glibc's."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    pairs = (
        (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, _KEEP),
        (_M_TOP_PAD, _MMAP_THRESHOLD),
        # other threads' arenas are of small pieces, which come and go with the blocks in them
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(key, value) for key, value in pairs)
