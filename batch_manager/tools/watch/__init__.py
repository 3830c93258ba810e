"""`batch-manager watch`: what a running engine does, in the terminal.

Owns     reading statistics from a file or from /metrics, the figures of an interval, and the screen
Not      the statistics, which the engine writes
Yours    a figure: a field of figures.Figures, and where it is read in sources.py
"""
