"""``quire explain`` and ``quire top``: looking at what runs, here or on a cluster. Changes nothing anywhere."""
