"""The parts of ``python -m benchmarks.serving.soak``, which serves for minutes while requests try to hurt one another.

``servers`` starts the gateway and the replicas, whose engine is that of ``poisonable``; ``clients`` sends the requests,
``probe`` asks ``/livez`` from a process of its own, ``memory`` samples the processes, ``expectations`` judges.
"""
