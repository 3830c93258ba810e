"""Requests: the user's request, its admission, and the running request.

Owns     the documented tensor names, shapes and ranges; the checks of a request that involve no other request; a
         request's tokens and progress
Not      blocks (kv), device state (slots), sent values (responses)
Yours    a new request tensor is a row of TENSORS in inference_request.py, a sampling parameter is a row in
         sampling_config.py; their checks go to admission.py; values for the device go into handover.SlotSetup
"""
