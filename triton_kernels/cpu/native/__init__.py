"""The compiled step: one call of C code, compiled for the local machine, runs a step of a model on a CPU.

Owns     products with packed matrices, norms, activations, rotation, paged attention, and their thread pool
Not      which operations a model consists of (batch_manager/layers/recording.py), when a step runs
Yours    a new operation is a kind in step.c and a function on a range of rows; a new matrix format goes into products.h
"""
