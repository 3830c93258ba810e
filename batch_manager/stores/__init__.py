"""Stores of blocks outside of the engine's memory: the third level of the prefix cache, after device and host blocks.

Owns     the protocol of a store, the directory on disk, what moves blocks between host blocks and stores or engines
Not      the device, the order of requests, which blocks are evicted
Yours    a store of your own has the methods of `BlockStore` (interface.py) and is passed as `Parts.block_store`
"""
