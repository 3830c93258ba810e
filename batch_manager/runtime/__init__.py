"""Runs steps on the device: chooses the form of each, uploads the batch, runs the model, reads the output back.

Owns     the KV cache pool, the block tables, packing, memory planning, the threads of a step; the device (device/), the
         forms of a step (forms/), pages of adapters (adapters/), a rank's part of a model (ranks/); the package's
         implementation of seams.ModelBackend
Not      requests; block accounting; scheduling; what a model computes (models); how a token is sampled (decoding)
Yours    another layout of a batch goes into packing.py; another backend is a separate file that implements
         seams.ModelBackend. Nothing is imported here, so that scripted_backend works without torch
"""
