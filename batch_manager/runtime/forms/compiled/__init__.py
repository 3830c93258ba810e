"""Steps whose layers are one call of compiled code, on a CPU.

Owns     the compiled forward, the decision for it and its comparison with torch; its number of threads
Not      the C code (triton_kernels/cpu/native); recording of layers (layers/recording.py)
Yours    an operation of a layer goes into layers/recording.py and step.c. Nothing is imported here
"""
