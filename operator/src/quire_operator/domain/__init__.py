"""The decisions of the operator: pure functions of values, without clock, I/O, kopf or HTTP."""
