"""Where quire meets the outside: Kubernetes, Prometheus, processes, the hub. Built and injected by the entry points."""
