"""A step from plan to checked output: claim resources, describe the step, launch it, read it, and rerun it if it fails.

Owns     the resources of running requests, device operations before a step, steps in flight, the check of outputs
Not      scheduling, appending tokens to requests and sending them (loop), blocks (kv)
Yours    a new kind of resource that a request needs to run is a Resource (resources.py); a new device operation before
         a step goes to device_work.py
"""
