"""The building blocks of a model: linear layers, embeddings, norms, rotary embedding, feed-forward networks.

Owns     how a layer computes on each device: with Triton kernels if `dispatch` selects them, else in tuned torch
Not      how models combine layers (models/), where keys and values are stored (attention/), files (weights/)
Yours    a new layer is a callable class whose constructor takes a Weights source and a LayerContext
"""
