"""The policies that are compared: our own, and peers implemented from their published formulas and documentation.

    signals   the view of each metrics pipeline on an observation
    hpa       Kubernetes' HorizontalPodAutoscaler, autoscaling/v2
    kpa       Knative's pod autoscaler
    keda      KEDA: a ScaledObject on a Prometheus query, which feeds an HPA
    llmd      llm-d's workload variant autoscaler, which feeds an HPA
    quire     ``domain.autoscaler.decide``, unchanged
    static    a fixed number, and a policy that knows all load up to now: the references

Each peer has its pure formulas as functions, tested on worked examples of its documentation, a frozen config whose
defaults are the published ones, and a ``simulation.scaler.Scaler``.
"""
