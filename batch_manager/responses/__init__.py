"""What each request has still to be sent, and the response tensors.

Owns     the documented response tensors, their shapes and dtypes; the values of each token until they are sent
Not      when a response is sent, and that a final is sent once (loop/finals.py, loop/callbacks.py)
Yours    a new response tensor is built in tensors.py from values that Deliveries keeps in deliveries.py
"""
