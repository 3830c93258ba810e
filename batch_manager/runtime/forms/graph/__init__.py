"""Captured graphs of the launches at fixed addresses, replayed in one call.

Owns     capturing and replaying, and the comparison of a replay with the launches
Not      the launches and their shapes (fixed); what a graph is (device)
Yours    a step that is to be replayed needs a shape in fixed/shapes.py. Nothing is imported here
"""
