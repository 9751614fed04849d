"""Graphs as people have them: tables of nodes and of edges, in CSV and Parquet.

:mod:`spec` says what a description may hold, :mod:`reader` reads its files a chunk at a time,
:mod:`columns` turns what they hold into arrays, and :mod:`ids` numbers the nodes.
"""
