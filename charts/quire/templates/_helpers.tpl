{{/* The release name in object names, short enough for a label with a suffix. */}}
{{- define "quire.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The name of cluster-scoped objects, unique for releases with the same name in different namespaces. */}}
{{- define "quire.clusterName" -}}
{{- printf "%s.%s" (include "quire.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* Call as: include "quire.selector" (dict "root" $ "component" "gateway") */}}
{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Call as: include "quire.image" (dict "root" $ "image" .Values.images.gateway) */}}
{{- define "quire.image" -}}
{{- $images := .root.Values.images -}}
{{- $repository := .image.repository -}}
{{- if $images.registry -}}{{- $repository = printf "%s/%s" (trimSuffix "/" $images.registry) $repository -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (coalesce .image.tag $images.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* The restricted profile of the Pod Security Standards, with the changes of podSecurityContext. */}}
{{- define "quire.podSecurity" -}}
{{- $context := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- with .Values.runAsUser }}
{{- $context = mergeOverwrite $context (dict "runAsUser" (int64 .) "runAsGroup" (int64 .)) }}
{{- end }}
{{- toYaml (mergeOverwrite $context .Values.podSecurityContext) }}
{{- end -}}

{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* A preference for different nodes. */}}
{{- define "quire.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
{{- end -}}

{{/* Scheduling settings of pods. Call with .Values.operator or .Values.gateway. */}}
{{- define "quire.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The protocol of the gateway, which is also the name of its ports. */}}
{{- define "quire.gateway.scheme" -}}
{{- if .Values.gateway.tls.secretName }}https{{ else }}http{{ end -}}
{{- end -}}

{{/* Paths for external clients. /metrics and /requests need no key and stay internal. */}}
{{- define "quire.gateway.paths" -}}
/v1 /tokenize /detokenize /rerank /v2/rerank /score
{{- end -}}

{{- define "quire.gateway.port" -}}
{{- if kindIs "invalid" .Values.gateway.service.port -}}
{{- if .Values.gateway.tls.secretName }}443{{ else }}80{{ end -}}
{{- else -}}
{{- .Values.gateway.service.port -}}
{{- end -}}
{{- end -}}

{{/* Namespaces that need Roles: the watched ones and the release's own. Empty if all namespaces are watched. */}}
{{- define "quire.roleNamespaces" -}}
{{- if .Values.watchNamespaces -}}
{{- append .Values.watchNamespaces .Release.Namespace | uniq | sortAlpha | join " " -}}
{{- end -}}
{{- end -}}

{{/* A role and its binding to the service account of a component; without a namespace, both are cluster-wide.
Call as: include "quire.role" (dict "root" $ "component" "gateway" "name" "…" "namespace" "…" "rules" "- …") */}}
{{- define "quire.role" -}}
{{- $kind := .namespace | empty | ternary "ClusterRole" "Role" }}
{{- $labels := include "quire.labels" . -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- $labels | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- $labels | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ $kind }}, name: {{ .name }}}
subjects:
  - {kind: ServiceAccount, name: {{ include "quire.fullname" .root }}-{{ .component }}, namespace: {{ .root.Release.Namespace }}}
{{- end -}}
