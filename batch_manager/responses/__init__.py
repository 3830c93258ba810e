"""The response tensors, and the values of each request that were not sent yet.

Owns     the documented response tensors, their shapes and dtypes; the values of each token until they are sent
Not      when a response is sent; the guarantee that each request gets one final response (loop/finals.py,
         loop/callbacks.py)
Yours    a new response tensor is built in tensors.py from values that Deliveries keeps in deliveries.py
"""
