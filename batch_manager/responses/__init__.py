"""What each request has not been told yet, and the tensors that tell it.

Owns     the documented response tensors, their shapes and dtypes; what is kept of each token until it is sent
Not      when a response is sent, and that a final is sent once (loop/finals.py, loop/callbacks.py)
Yours    a new response tensor is built in tensors.py from what Deliveries keeps in deliveries.py
"""
