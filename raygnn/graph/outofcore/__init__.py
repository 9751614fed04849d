"""Partitions, built with what grows with the edges on disk; of graphs that do not fit into memory
also with features there.

:mod:`graph_stages` brings a graph to the disk, :mod:`edge_shuffle` its edges to their parts,
and :mod:`divide` has the sequence of the stages. Each is cut into tasks, which :mod:`workspace`
runs and remembers. Errors are those of reading the graph in memory.
"""
