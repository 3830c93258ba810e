"""Optional features. Each module states which extra installs the libraries that it needs.

Owns     adapters from third-party libraries to the engine's documented hooks (Parts, callbacks)
Not      anything the engine needs to run; request tensors, blocks, the loop
Yours    a new adapter is one file, with its library in an extra of pyproject.toml. It raises ConfigError if the library
         is not installed
"""
