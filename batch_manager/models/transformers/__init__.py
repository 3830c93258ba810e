"""Models that transformers implements, run with the engine's attention and KV cache.

Owns     the list of model types that run this way; reading their configurations; finding out how their layers attend;
         loading their parameters; the comparison with transformers' own attention when a model is loaded
Not      the families of models/, which do not need transformers; steps and requests; code in a checkpoint: model types
         are looked up in a list of this package, and nothing is downloaded
Yours    a model type gets onto the list by passing tests/campaigns/transformers_types.py, which writes
         proven_types.py. A new kind of attention needs code in mask_reading.py and discovery.py

This file imports nothing: transformers is an optional dependency, imported only for a model that needs it.
"""
