{{/* Releases may begin with a digit and have dots; a Service's name may not. */}}
{{- define "hybrid-sparse.name" -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- $name = printf "vllm-%s" $name -}}
{{- end -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "hybrid-sparse.selector" -}}
app.kubernetes.io/name: vllm-hybrid-sparse
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "hybrid-sparse.labels" -}}
{{ include "hybrid-sparse.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}
