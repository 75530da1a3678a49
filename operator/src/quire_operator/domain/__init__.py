"""What quire decides: pure functions of values. No clock, no I/O, no kopf, no HTTP."""
