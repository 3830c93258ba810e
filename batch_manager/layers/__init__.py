"""The building blocks of a model: linear maps, embeddings, norms, rotation, feed-forward networks.

Owns     how one block computes on each kind of device: Triton kernels where dispatch says so, a tuned torch path else
Not      how blocks are put together (models/), where keys and values live (attention/), where files are (weights/)
Yours    a new block takes a Weights source and a LayerContext in the constructor and is a plain callable
"""
