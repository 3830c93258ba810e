"""Ready-made pieces that need a library the core does without; each names the extra that installs it.

Owns     adapters between such a library and a documented hook of the engine (Parts, callbacks), imported when made
Not      anything the engine needs to run; requests' tensors, blocks, the loop
Yours    one file per adapter, its library in an extra of pyproject.toml, a clear error where that is not installed
"""
