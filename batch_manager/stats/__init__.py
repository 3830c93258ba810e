"""Statistics: one record per iteration, its JSON form, and a trace for pictures.

Owns     the names of the statistics and their meaning
Not      decisions: no decision depends on a statistic
Yours    a new statistic is a field of IterationStats, a line of loop/reporter.py and a row of
         statistics_table.py; a Resource names its own statistics (steps/resources.py)
"""
