"""`batch-manager bench`: serve a workload with a GptManager, through its callbacks, and say how fast that was.

Owns     loads, stamps, the figures that follow from them, and the files that hold the results
Not      what is measured: an engine is reached through GptManager, its callbacks and its statistics
Yours    a new figure is a line in metrics.py and one in help_text.py; a new option is a line in options.py and, where
         gptManagerBenchmark has it under another name, in original_options.py
"""
