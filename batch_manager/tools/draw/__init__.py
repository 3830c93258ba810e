"""Draw which request of a trace ran in which iteration: as text, as SVG or as an HTML page.

    batch-manager draw trace.jsonl                               # as text
    batch-manager draw trace.jsonl --html run.html               # any number of requests and iterations
    batch-manager draw --demo --policy guaranteed_no_evict --num-blocks 20 --svg schedule.svg

A `batch_manager.TraceFile` writes a trace. A program draws a trace with `text.render_text`, `svg.render_svg` or
`html.write_html`.

Owns     pictures of a run, and the format of the data in a page
Not      reading traces (stats/trace.py); running an engine, except for the demonstration
Yours    a new picture: one file with a function of iterations or of a `Timeline`, and one option in command_line.py;
         a new chart of the page: one entry of `chartsOf` in page/counters.js
"""
