"""Support for the end-to-end scenarios: the cluster, the installed chart, namespaces, and the results of a run.

``target`` is the cluster, ``release`` the installed chart, ``space`` a namespace with its LLMDeployments. ``traffic``
streams requests and checks every answer. ``results`` and ``evidence`` store the outcome.
"""
