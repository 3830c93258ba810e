"""One of several ranks on the device: what it exchanges with the others inside a step, and its part of a model.

Owns     torch's process groups, the Exchange of a step, the backend of a rank
Not      frames, sockets and the start of the ranks (parallel), the loop of the other ranks (loop/follower.py)
Yours    nothing is imported here
"""
