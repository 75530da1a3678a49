"""A fleet of engines that exists only in numbers: what would have happened under a trace, a policy and some bad luck.

    scenario             what is given besides requests: the engine's speed, the life of replicas, faults
    scaler               who decides: ``domain.autoscaler.decide`` unchanged, or another law
    kv, sequence         one engine's blocks; one request on its way
    decoding, steps      those that decode together; how long steps take
    counters, engine     what a scrape shows; one engine's queue and steps
    balance, gateway     which engine a request goes to
    fleet                replicas that come, serve and go
    simulate             the clock: arrivals, ticks and faults in their order
    run, summary         what came of it, whole and in a few figures
    speed                how fast an engine is, by the best that is known
    command, report      ``quire simulate``

But for the last three: standard library and ``domain`` only, no clock and no I/O; the same arguments give the same
``Run``.
"""
