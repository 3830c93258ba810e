"""What happened: one record per iteration, its JSON, and a trace for pictures.

Owns     the names of the statistics and how they are counted
Not      decisions: nothing reads a statistic to decide anything
Yours    a new figure is a field of IterationStats and a line in stats_json.py; what a Resource counts, it names itself
         (steps/resources.py)
"""
