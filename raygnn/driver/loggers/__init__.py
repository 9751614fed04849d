"""Loggers, each fed from ``metrics.jsonl``: what one does not take yet waits in that file.

Those that write files do so in a thread of the driver. Those that talk to a server have a process
each: their packages take seconds to import, change the process that they are in (its signals, its
exit, its output), and may wait for a server for ever.
"""
