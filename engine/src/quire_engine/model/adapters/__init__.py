"""Low-rank adapters of native models: reading them (``peft``), and the slots of a model's linear layers (``slots``)."""
