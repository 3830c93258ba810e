"""Values that the options of several classes share."""

QUANTIZATIONS = ("int8", "int4")
MAX_POSITION = 2**31 - 1      # steps compute positions as int32
MAX_THREADS = 1024            # with several thousand threads, OpenMP ends the process when it cannot start a thread
