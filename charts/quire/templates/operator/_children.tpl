{{/* Arguments of the operator for the optional objects of an LLMDeployment. */}}
{{- define "quire.operator.childArgs" -}}
{{- $network := .Values.networkPolicies }}
{{- if $network.replicas.enabled }}
{{- $peers := list (include "quire.operator.peer" (dict "root" . "component" "operator") | fromYaml) }}
{{- if .Values.gateway.create }}
{{- $peers = append $peers (include "quire.operator.peer" (dict "root" . "component" "gateway") | fromYaml) }}
{{- end }}
{{- with $network.replicas.prometheusNamespace }}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .) }}
{{- $pods := dict "matchLabels" (dict "app.kubernetes.io/name" "prometheus") }}
{{- $peers = append $peers (dict "namespaceSelector" $namespace "podSelector" $pods) }}
{{- end }}
- {{ printf "--network-policy-from=%s" (concat $peers $network.metricsFrom $network.replicas.from | toJson) | quote }}
{{- end }}
{{- if not .Values.gateway.create }}
# Clients use the Service of each LLMDeployment, so several may have the same served name.
- --served-names=shared
{{- else if eq .Values.gateway.servedNames "Namespaced" }}
- --served-names=namespaced
{{- end }}
{{- with .Values.monitoring }}
{{- if .replicas.enabled }}
- --monitor-interval={{ .podMonitors.interval }}
- --runbook-url={{ .alerts.runbookUrl }}
{{- with .podMonitors.labels }}
- --monitor-labels={{ include "quire.operator.labelList" . }}
{{- end }}
{{- with .alerts.labels }}
- --alert-labels={{ include "quire.operator.labelList" . }}
{{- end }}
{{- else }}
- --monitors=off
{{- end }}
{{- end }}
{{- end -}}

{{- define "quire.operator.peer" -}}
namespaceSelector:
  matchLabels: {kubernetes.io/metadata.name: {{ .root.Release.Namespace }}}
podSelector:
  matchLabels:
    {{- include "quire.selector" . | nindent 4 }}
{{- end -}}

{{- define "quire.operator.labelList" -}}
{{- $pairs := list }}
{{- range $name, $value := . }}{{ $pairs = append $pairs (printf "%s=%s" $name $value) }}{{ end }}
{{- join "," $pairs }}
{{- end -}}
