"""Checkpoints: a folder with config.json and safetensors files, or a GGUF file, becomes typed fields and tensors.

Owns     reading untrusted files: JSON with checked types, safetensors, GGUF and nothing else, no path outside the
         folder; a GGUF file's keys, names and layouts as Hugging Face's
Not      what a family's tensors are called or how they are used (models/), where they end up in a layer (layers/)
Yours    a new source of tensors satisfies source.Weights; every fault it finds is a ModelLoadError
"""
