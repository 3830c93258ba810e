"""Several processes, called ranks, that run one model: which of them a process is, and how they speak to each other.

Owns     the variables of launchers; frames between rank 0 and the other ranks, their values as bytes, lost ranks
Not      collectives and devices (runtime), what a step does (steps), torch
Yours    another launcher is a row of LAUNCHERS in mapping.py; another value that travels is a class in wire.py

    mapping   which rank this process is
    wire      values <-> bytes
    channel   bytes <-> numbered and checked frames, over a transport
    control   the transports of real processes: sockets with a key, and the threads that send beats
    ranks     Leader (rank 0) and Link (every other rank): start together, steps, loss, end
    leading   the backend of rank 0, which sends each step to the other ranks before it runs its own part
"""
