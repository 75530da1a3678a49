"""quire without a cluster: ``quire up``, ``plan`` and ``explain``. Above the adapters, which it joins, below cli."""
