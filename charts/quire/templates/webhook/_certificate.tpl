{{- define "quire.webhook.name" -}}
{{ include "quire.fullname" . }}-webhook
{{- end -}}

{{- define "quire.webhook.secretName" -}}
{{- default (printf "%s-certificate" (include "quire.webhook.name" .)) .Values.webhook.certificate.secretName -}}
{{- end -}}

{{- define "quire.webhook.dnsName" -}}
{{ include "quire.webhook.name" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* The chart's own certificate, generated at the first installation and kept by every upgrade. It is a JSON dict, because
the secret and the configuration need the same certificate and each call of genCA generates a new one. */}}
{{- define "quire.webhook.ownCertificate" -}}
{{- if not (hasKey .Values.webhook "made") -}}
{{- $made := dict -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace (include "quire.webhook.secretName" .) -}}
{{- if and $found (hasKey ($found.data | default dict) "ca.crt") -}}
{{- $made = $found.data -}}
{{- else -}}
{{- $dns := include "quire.webhook.dnsName" . -}}
{{- $ca := genCA (printf "%s-ca" (include "quire.webhook.name" .)) 3650 -}}
{{- $leaf := genSignedCert $dns nil (list $dns (printf "%s.%s" $dns .Values.operator.clusterDomain)) 3650 $ca -}}
{{- $made = dict "ca.crt" ($ca.Cert | b64enc) "tls.crt" ($leaf.Cert | b64enc) "tls.key" ($leaf.Key | b64enc) -}}
{{- end -}}
{{- $_ := set .Values.webhook "made" $made -}}
{{- end -}}
{{- toJson .Values.webhook.made -}}
{{- end -}}
