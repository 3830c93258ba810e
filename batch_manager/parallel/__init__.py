"""Several processes, called ranks, that run one model: which of them a process is.

Owns     the variables of launchers
Not      collectives and devices (runtime), what a step does (steps)
Yours    another launcher is a row of LAUNCHERS in mapping.py
"""
