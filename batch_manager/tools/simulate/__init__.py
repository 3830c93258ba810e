"""What-if runs: the production loop, scheduler and KV cache manager under a virtual clock.

Owns     the cost of a step and of the host, fitted from traces; the model backend that computes nothing and takes that
         time; one engine or several under one stream of requests; their figures
Not      scheduling, blocks and the order of an iteration, which are the engine's own; nor the options and figures that
         `batch-manager bench` has, which are taken from there
Yours    another routing rule is a class with `choose`, and a line in `routing`
"""
