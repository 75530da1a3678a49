"""``quire simulate``: what would have happened under a trace, a policy and faults, with engines that are only numbers.

command    the options and the report
speed      how fast an engine is, from the best source
traces     the requests of recorded traces
fleet      replicas, the gateway before them, the autoscaler above them, and the order of events
engine     one engine: its queue, KV blocks and steps
results    every request's times, and a summary
"""
