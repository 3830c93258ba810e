"""Models that transformers implements, run through the engine's attention and KV cache.

Owns     which model types are run this way, the reading of their configurations, how a layer of them attends, the
         loading of their parameters, and the comparison with transformers' own attention that each model passes as it
         is loaded
Not      the families of models/, which need no transformers; steps, requests; code that a checkpoint brings or names:
         a model type is looked up in a list of this package, and nothing is downloaded
Yours    a model type comes onto the list by passing tests/campaigns/transformers_types.py, which writes
         proven_types.py. A new kind of attention is read in mask_reading.py and discovery.py

Nothing is imported here: transformers is an extra, and only a model that needs it imports it.
"""
