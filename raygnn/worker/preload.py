"""Imported first by every process of a local Ray, which imports a great deal in its life.

A tenth of the garbage collector's passes: imports make no garbage, and looking for it costs a
fifth of their time, in every process.
"""

import gc

gc.set_threshold(50_000, 20, 20)
