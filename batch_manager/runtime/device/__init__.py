"""The device that runs steps. No other folder names torch.cuda.

Owns     devices by name; figures of memory; streams, uploads, readbacks, captured graphs; errors of the device
Not      batches, models, forms of a step
Yours    what a step calls on the device goes into running.py; what is asked while loading, or for statistics, into
         devices.py and memory.py. Nothing is imported here
"""
