"""The oracle of every kernel: same file name and signature, torch only, simple and slow.

An oracle computes in float32 or wider, in float64 for float64 inputs, and rounds when it stores a result. Tests call it
with float64 copies of a kernel's inputs. The docstring of the kernel's file says what both compute. Nothing here
imports triton.
"""
