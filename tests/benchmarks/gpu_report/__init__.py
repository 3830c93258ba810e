"""One program that measures this package on the GPU at hand: `python -m tests.benchmarks.gpu_report --help`.

Owns     the goals, the measurements of each goal, and the files of the results
Not      the measured code: kernels are called through their launchers, engines through GptManager
Yours    a new section is one file with `run(bench) -> Iterator[Record]` and a row in sections.py; a new goal is a row
         in goals.py
"""
