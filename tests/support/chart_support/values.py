"""Values that the chart is rendered with: the defaults, the least, everything, and what lies between."""

from typing import Any

DIGEST = "sha256:" + "0123456789abcdef" * 4

EVERYTHING: dict[str, Any] = {
    "fullnameOverride": "inference",
    "watchNamespaces": ["team-a", "team-b"],
    "images": {
        "registry": "registry.example:5000/team/",
        "tag": "1.2.3",
        "pullPolicy": "Always",
        "pullSecrets": ["pull"],
        "engine": {"digest": DIGEST},
        "gateway": {"repository": "edge/gateway", "tag": "main"},
    },
    "operator": {
        "replicas": 3,
        "logLevel": "debug",
        "workers": 8,
        "resync": "90s",
        "clusterDomain": "corp.internal",
        "hubEndpoint": "https://hub.example/mirror",
        "prometheus": {
            "url": "https://prometheus.example:9090/tenant",
            "podLabel": "kubernetes_pod_name",
            "tokenSecret": {"name": "reader", "key": "bearer"},
            "caConfigMap": {"name": "authority"},
        },
        "serviceAccount": {"annotations": {"example.com/role": "operator"}},
        "podAnnotations": {"example.com/team": "ml"},
        "podLabels": {"team": "ml"},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    },
    "webhook": {"create": True, "certificate": {"issuer": {"name": "internal"}}},
    "gateway": {
        "replicas": None,
        "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 30, "targetCPUUtilizationPercentage": 60},
        "tls": {"secretName": "gateway-tls"},
        "auth": {"secretName": "gateway-keys"},
        "logLevel": "warning",
        "holdLimit": 5,
        "holdTimeoutSeconds": 1.5,
        "maxBodyBytes": 2147483648,
        "bodyMemoryBytes": 1048576,
        "maxConnections": 10,
        "sharePrefixes": "all",
        "hideNames": True,
        "drainTimeoutSeconds": 30,
        "service": {"type": "LoadBalancer", "port": 8443, "annotations": {"example.com/internal": "true"}},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"},
            "hosts": ["llm.example.com", "*.llm.example.com"],
            "tls": [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}],
        },
        "httpRoute": {
            "enabled": True,
            "annotations": {"example.com/owner": "edge"},
            "parentRefs": [{"name": "public", "namespace": "gateways"}],
            "hostnames": ["llm.example.com"],
            "timeouts": {"request": "0s"},
        },
        "priorityClassName": "high",
        "nodeSelector": {"pool": "edge"},
    },
    "networkPolicies": {
        "enabled": True,
        "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"team": "ml"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
    "monitoring": {
        "podMonitors": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "30s"},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "quire"}},
        "alerts": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "runbookUrl": "https://runbooks.example/quire/",
            "disabled": ["QuireEngineRestarting"],
            "thresholds": {"freeKVBlocksPercent": 7.5, "queueTime": "3m"},
        },
    },
}
LEAST: dict[str, Any] = {
    "crds": {"create": False},
    "rbac": {"create": False, "aggregatedRoles": False},
    "operator": {"podDisruptionBudget": {"create": False}},
    "gateway": {"podDisruptionBudget": {"create": False}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "one namespace": {"watchNamespaces": ["llm"]},
    "operator only": {"gateway": {"create": False}, "networkPolicies": {"enabled": True}},
    "least": LEAST,
}
