"""Runs steps on the device: packs and uploads a batch, runs the model, and reads the output back.

Owns     the KV cache pool, the block tables on the host and on the device, the inputs and graphs of steps, memory
         planning, the streams and threads of a step; the package's implementation of seams.ModelBackend
Not      requests; block accounting; scheduling; what a model computes (models); how a token is sampled (decoding)
Yours    another layout of a batch goes into layouts.py; another backend is a separate file that implements
         seams.ModelBackend. Nothing is imported here, so that scripted_backend works without torch
"""
