"""The step on the device: a batch is packed, uploaded, run, and its output brought back.

Owns     the pool of keys and values, the mirror of the block tables and its copy on the device, the inputs of a step
         and graphs of it, memory arithmetic, streams and threads of a step; the implementations of seams.ModelBackend
Not      requests, who owns a block, who runs; what a model computes (models); how a token is chosen (decoding)
Yours    another way to lay a batch out goes to layouts.py; another backend is a file of its own that implements
         seams.ModelBackend. Nothing is imported here, so that scripted_backend works where torch is not wanted
"""
