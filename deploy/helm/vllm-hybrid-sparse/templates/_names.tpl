{{- define "hybrid-sparse.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "hybrid-sparse.selector" -}}
app.kubernetes.io/name: vllm-hybrid-sparse
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "hybrid-sparse.labels" -}}
{{ include "hybrid-sparse.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "hybrid-sparse.memory" -}}
{{- with .Values.memory -}}
{{- add .kvCacheGiB .weightsGiB .packedGiB .overheadGiB .sharedGiB -}}Gi
{{- end -}}
{{- end -}}
