"""A step of a model on a CPU in one call: C that is compiled for the machine it runs on.

Owns     products with packed matrices, norms, activations, rotation, attention over pages, and the threads they share
Not      which operations a model consists of (batch_manager/layers/recording.py), when a step runs
Yours    an operation is a kind in step.c and what it does to some rows; a way to hold a matrix is a kind in products.h
"""
