"""The response tensors, and the values of each request that were not sent yet.

Owns     the documented response tensors, their shapes and dtypes; the values of each token until they are sent
Not      the time of a response; the guarantee of one final (loop/finals.py, loop/callbacks.py)
Yours    a new response tensor is built in tensors.py from values that Deliveries keeps in deliveries.py
"""
