"""Steps at fixed addresses on a GPU: launches whose arguments depend on the padded shape of the step alone.

Owns     the input buffer and its arrays; block tables on the device; a model recorded as launches, and the joining of
         launches with their matrix product
Not      graphs of these launches (graph); kernels (triton_kernels)
Yours    an array that the launches read is a section in inputs.py; a recorded operation is a class in recording.py and
         a launch in fused.py. Nothing is imported here
"""
