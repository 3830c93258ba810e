"""`batch-manager bench`: serve a workload through the callbacks of a GptManager and measure how fast it is.

Owns     arrival processes, token timestamps, the figures computed from them, and the result files
Not      the engine, which is used only through GptManager, its callbacks and its statistics
Yours    a new figure is a line in metrics.py and a line in help_text.py; a new option is a line in options.py and, if
         gptManagerBenchmark has it under another name, a line in original_options.py
"""
