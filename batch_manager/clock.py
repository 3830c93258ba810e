"""The real time. A simulation hands over its own (seams.Clock)."""

import time


class SystemClock:
    """Time of this machine."""

    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def timestamp() -> str:
        return time.strftime("%m-%d-%Y %H:%M:%S")
