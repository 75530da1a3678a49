"""A fleet of engines that exists only in numbers: what would have happened under a trace, a policy and some bad luck.

    scenario   what is given: requests, the engine's speed, faults
    scaler     who decides, ``domain.autoscaler.decide`` unchanged or another law
    kv         one engine's blocks
    engine     one engine's queue, steps and counters
    gateway    which engine a request goes to
    fleet      replicas that come, serve and go
    simulate   the clock: arrivals, ticks and faults in their order
    run        what came of it

Standard library and ``domain`` only, no clock and no I/O: the same arguments give the same ``Run``.
"""
