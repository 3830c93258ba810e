"""The forms of a step: the ways in which a step can be computed. docs/steps.md says which one a step gets.

Owns     the forms, and the comparison of a form with the model's own layers
Not      the state that all forms share: the KV cache pool, block tables, sampling state (runtime, decoding)
Yours    a form gets a folder of its own. Nothing is imported here
"""
