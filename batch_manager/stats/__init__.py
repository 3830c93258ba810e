"""Statistics: one record per iteration, its JSON form, and a trace for pictures.

Owns     the names of the statistics and their meaning
Not      decisions: no decision depends on a statistic
Yours    a new statistic is a line of `figures` of its owner (those in loop/generation_loop.py, and the backend) and a
         row of statistics_table.py
"""
