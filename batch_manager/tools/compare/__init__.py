"""`batch-manager compare`: ratios of results of bench, and whether a difference exceeds the spread of the runs.

Owns     pairs and sides of runs, what makes runs comparable, and the tables
Not      results themselves: bench writes them
Yours    a figure that is compared is a line in figures.FIGURES
"""
