"""Build partitions with the edges on disk, and the features, too, if they do not fit into memory.

:mod:`divide` runs the stages in order: :mod:`graph_stages` writes the graph to disk, and
:mod:`edge_shuffle` moves edges to their parts. Stages are divided into tasks, which
:mod:`workspace` runs and records. Errors are the same as for a graph in memory.
"""
