{{/* Each GPU has a worker of its own; a pod without GPUs has one. */}}
{{- define "hybrid-sparse.workers" -}}
{{- max 1 (int .Values.gpu.count) -}}
{{- end -}}

{{- define "hybrid-sparse.kvCache" -}}
{{- mul (include "hybrid-sparse.workers" .) .Values.memory.kvCacheGiB -}}Gi
{{- end -}}

{{- define "hybrid-sparse.shared" -}}
{{- mul (include "hybrid-sparse.workers" .) .Values.memory.sharedGiB -}}Gi
{{- end -}}

{{- define "hybrid-sparse.memory" -}}
{{- $workers := include "hybrid-sparse.workers" . -}}
{{- with .Values.memory -}}
{{- add .weightsGiB (mul $workers (add .kvCacheGiB .packedGiB .overheadGiB .sharedGiB)) -}}Gi
{{- end -}}
{{- end -}}
