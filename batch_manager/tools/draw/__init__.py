"""A trace as a picture: who ran in which iteration, as text, as SVG and as a page for a browser.

    batch-manager draw trace.jsonl                               # as text
    batch-manager draw trace.jsonl --html run.html               # any number of requests and iterations
    batch-manager draw --demo --policy GUARANTEED_NO_EVICT --num-blocks 20 --svg schedule.svg

A trace is what a `batch_manager.TraceFile` wrote. `text.render_text`, `svg.render_svg` and `html.write_html` draw one
from a program.

Owns     pictures of a run, and the format of the data in a page
Not      reading traces (stats/trace.py), or an engine: the demonstration alone runs one
Yours    a new picture is one file with a function of iterations or of a `Timeline`, and one option in command_line.py;
         a new chart of the page is one entry of `chartsOf` in page/counters.js
"""
