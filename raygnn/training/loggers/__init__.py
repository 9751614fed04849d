"""Lightning's loggers, fed with the records of a run in a process of their own.

What they import takes seconds, a server may not answer, and what they start at their end may wait
for ever: none of that belongs into the process that watches the ranks, let alone into a rank.
"""
