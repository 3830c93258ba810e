"""LoRA adapters on the device: their pages, and the port that adds their outputs to those of `Linear` layers.

Owns     where a projection is in a page, loads, the adapters of each step's rows, products with pages
Not      which adapters are in which pages (kv/peft_cache_manager.py); products of compiled steps (step.c)
Yours    a kernel for `LoraModule.add` goes in beside the products there. Nothing is imported here
"""
