"""What-if simulations: the production loop, scheduler and KV cache manager under a virtual clock.

Owns     the cost model of steps and host, fitted on traces; the model backend that computes nothing and takes the time
         that the cost model predicts; one or more engines that serve one stream of requests; their figures
Not      scheduling, blocks and the order of an iteration, which the engine owns; options and figures that
         `batch-manager bench` owns and shares
Yours    a new routing rule: a class with `choose`, and a line in routing.ROUTING
"""
