"""What is asked: the user's request, its admission, the running request, and the tensors sent back.

Owns     the documented tensor names, shapes and ranges; every reason for a refusal; a request's text and progress
Not      blocks (kv), device state (slots), what was already sent (loop/responder)
Yours    a new request tensor starts in inference_request.py; its checks in admission.py; what the device must know
         about it in handover.SlotSetup
"""
