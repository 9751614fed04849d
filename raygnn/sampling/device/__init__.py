"""Sampling and reading of rows on a GPU.

Imported only where that is done: Triton comes with torch's builds for GPUs, and not with raygnn.
"""
