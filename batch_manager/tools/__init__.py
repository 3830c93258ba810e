"""Programs around the engine: `python -m batch_manager.tools.NAME --help`, or `batch-manager COMMAND` for most.

Owns     measuring and showing what the engine does, from outside
Not      anything the engine needs: no other package imports from here
Yours    a new tool: one file with `main(argv) -> exit status`. That function imports what only a run needs, torch
         above all, so that --help is fast. One line in __main__.py makes it a command
"""
