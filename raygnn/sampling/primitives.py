"""What the compiled loops of sampling are made of: a hash, draws from it, asking for memory."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types, uint64
from numba.extending import intrinsic


@njit(inline="always")
def mix(value):  # type: ignore[no-untyped-def]
    value = uint64(value) + uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> uint64(27))) * uint64(0x94D049BB133111EB)
    return value ^ (value >> uint64(31))


@njit(inline="always")
def below(random, bound):  # type: ignore[no-untyped-def]
    """A number in [0, bound) from 64 random bits (bound < 2³², bias below 2⁻³²)."""
    return np.int64(((random >> uint64(32)) * uint64(bound)) >> uint64(32))


@njit(inline="always")
def floyd(out, at, take, count, state):  # type: ignore[no-untyped-def]
    """Write ``take`` distinct numbers in [0, count) to ``out[at:]``."""
    for j in range(take):
        last = count - take + j
        pick = below(mix(state + uint64(j)), last + 1)
        for seen in range(j):
            if out[at + seen] == pick:
                pick = last
                break
        out[at + j] = pick


@njit
def smallest(values, kept):  # type: ignore[no-untyped-def]
    """The n-th smallest of at least n values, n being the length of ``kept``, which is scratch.

    By keeping the n smallest so far; numpy's partition takes numba too long to compile.
    """
    kept[:] = values[: kept.shape[0]]
    worst = np.argmax(kept)
    for j in range(kept.shape[0], values.shape[0]):
        if values[j] < kept[worst]:
            kept[worst] = values[j]
            worst = np.argmax(kept)
    return kept[worst]


@intrinsic
def prefetch(context, array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line that ``array[index]`` (contiguous) is in."""

    def build(context, builder, signature, values):  # type: ignore[no-untyped-def]
        whole = context.make_array(signature.args[0])(context, builder, values[0])
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        place = builder.bitcast(builder.gep(whole.data, [values[1]]), byte)
        builder.call(call, [place, flag(0), flag(3), flag(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(array, index), build
