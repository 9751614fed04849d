"""Memory that is freed is kept for the next step.

A training step frees and asks for the same large tensors again. By default glibc gives such
blocks back to the system, and every step pays for them with page faults, which on a CPU cost
more than the arithmetic.
"""

from __future__ import annotations

# read by glibc when a process starts: later is too late, since threads keep their arenas
ENVIRONMENT = {
    # glibc takes no threshold above 32 MiB on 64-bit systems
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(32 << 20),
    # other threads' arenas are of small pieces, which come and go with the blocks in them
    "MALLOC_ARENA_MAX": "1",
}
