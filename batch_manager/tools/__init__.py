"""Programs around the engine: `python -m batch_manager.tools.NAME --help`, the usual ones as `batch-manager COMMAND`.

Owns     measuring and showing what the engine does, from outside
Not      anything the engine needs: nothing in the package imports from here
Yours    a new tool is one file with `main(argv) -> exit status`; what only its run needs (torch above all) is imported
         in there, so that --help answers at once. One line in __main__.py makes it a command
"""
