"""Programs around the engine. Each runs as `python -m batch_manager.tools.NAME`, and most as `batch-manager COMMAND`.

Owns     measuring and showing what the engine does, from outside
Not      anything the engine needs: no other package imports from here
Yours    a new tool: one file with `main(argv) -> exit status`. Modules that only a run needs, above all torch, are
         imported inside functions, so that --help is fast. One line in __main__.py makes the tool a command
"""
