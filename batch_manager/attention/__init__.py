"""Attention over the paged KV cache. It is planned once per step and run once per layer.

Owns     how the keys and values of a step are written to the pool, and how queries read them
Not      which request owns which block (block tables are an input), requests, sampling
Yours    a new implementation satisfies interface.Attention and is selected in registry.py
"""
