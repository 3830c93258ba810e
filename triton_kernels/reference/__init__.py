"""The oracle of every kernel: same file name, same signature, torch only, simple and slow.

An oracle computes in float32, or in float64 when its inputs are float64, and rounds once when it stores. Tests feed it
float64 copies of a kernel's inputs. Nothing here imports triton.
"""
