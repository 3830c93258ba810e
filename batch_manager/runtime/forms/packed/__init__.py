"""Steps that call the model layer by layer, on any device.

Owns     forwards of a packed and of a padded call
Not      how a batch is packed (runtime/packing.py)
Yours    every new capability of a step comes here first. Nothing is imported here
"""
