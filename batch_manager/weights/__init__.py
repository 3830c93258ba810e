"""Reads checkpoints as typed fields and tensors: GGUF files, or folders with config.json and safetensors files.

Owns     reading untrusted files: JSON with checked types, safetensors and GGUF, no pickle, no path outside the folder;
         translating a GGUF file's keys, names and layouts into Hugging Face's; which part of a matrix a process reads
Not      the tensor names of a model family and their use (models/), the layers that hold the tensors (layers/)
Yours    a new source of tensors implements source.Weights and raises ModelLoadError for every fault it finds
"""
