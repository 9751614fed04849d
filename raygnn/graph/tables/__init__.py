"""Graphs as tables of nodes and edges, in CSV, Parquet or a database.

:mod:`description` has the YAML, :mod:`reader` reads files a chunk at a time, :mod:`columns`
converts columns to arrays, :mod:`ids` numbers the nodes, :mod:`table_stages` has the sequence.

Errors in a table are `DataError` with file, row and column; errors in a description `ConfigError`
with key and line; errors in a query `DataError` with the key of its table.
"""
