"""What is asked: the user's request, its admission, and the running request.

Owns     the documented tensor names, shapes and ranges; every reason for a refusal; a request's tokens and progress
Not      blocks (kv), device state (slots), what was already sent (responses)
Yours    a new request tensor is a row of TENSORS in inference_request.py, a sampling parameter one of
         sampling_config.py; its checks are in admission.py, and until it runs it is a row of NOT_BUILT there; what the
         device must know about it goes into handover.SlotSetup
"""
