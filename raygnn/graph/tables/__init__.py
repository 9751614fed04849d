"""Graphs as people have them: tables of nodes and of edges, in CSV and Parquet.

:mod:`description` has the YAML, :mod:`reader` reads files a chunk at a time, :mod:`columns`
converts columns to arrays, :mod:`ids` numbers the nodes, :mod:`table_stages` has the sequence.

What reads a table raises `DataError` naming file, row and column; what reads a description,
`ConfigError` with its key and line; what runs a query, `DataError` with the key of its table.
"""
