"""Graphs as people have them: tables of nodes and of edges, in CSV and Parquet.

:mod:`description` says how they are described, :mod:`reader` reads their files a chunk at a time,
:mod:`columns` turns what they hold into arrays, and :mod:`ids` numbers the nodes.
"""
