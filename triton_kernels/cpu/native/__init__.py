"""The compiled step: a step of a model on a CPU in one call, in C that is compiled for the local machine.

Owns     products with packed matrices, norms, activations, rotation, paged attention, and their thread pool
Not      which operations a model consists of (batch_manager/layers/recording.py), when a step runs
Yours    a new operation is a kind in step.c and a function on a range of rows; a new matrix format goes into products.h
"""
