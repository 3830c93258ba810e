"""Optional features. Each module states which extra installs the libraries that it needs.

Owns     adapters from third-party libraries to the engine's documented hooks (Parts, callbacks)
Not      anything the engine needs to run; request tensors, blocks, the loop
Yours    one file per adapter; its library in an extra of pyproject.toml; a ConfigError when it is not installed
"""
