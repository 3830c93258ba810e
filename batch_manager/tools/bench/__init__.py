"""`batch-manager bench`: serve a workload with a GptManager, through its callbacks, and say how fast that was."""
