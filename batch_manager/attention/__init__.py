"""Attention over the paged KV cache: planned once a step, run once a layer.

Owns     how one step's keys and values reach the pool and how queries read them
Not      which blocks belong to whom (it is handed tables), requests, sampling
Yours    a new implementation satisfies interface.Attention and is chosen in registry.py
"""
