"""A step from the plan to its checked output: claim, describe, launch, read, and run again what failed.

Owns     what a running request holds, what the device must do before a step, the steps in flight, the check of outputs
Not      who runs (scheduling), what a request makes of its tokens and who is told of them (loop), blocks (kv)
Yours    something else that a request must hold to run is a Resource (resources.py); an operation that the device does
         before a step is added to device_work.py
"""
