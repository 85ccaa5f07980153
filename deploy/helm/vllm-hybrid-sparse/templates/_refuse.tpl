{{/* Rules between values, which values.schema.json cannot say. `helm lint` reports them and passes. */}}
{{- define "hybrid-sparse.refuse" -}}
{{- with .Values -}}
{{- if and (regexMatch "^/model(/|$)" .model.path) (not .model.claim) -}}
{{- fail (printf "model.path=%s: a folder of the volume model.claim, and no claim is given; set model.claim, or model.path to a name that vLLM downloads" .model.path) -}}
{{- end -}}
{{- if and (eq .strategy.type "RollingUpdate") (not (regexFind "[1-9]" (printf "%v %v" .strategy.rollingUpdate.maxSurge .strategy.rollingUpdate.maxUnavailable))) -}}
{{- fail (printf "strategy.rollingUpdate.maxUnavailable=%v: must be above 0 if maxSurge is 0" .strategy.rollingUpdate.maxUnavailable) -}}
{{- end -}}
{{- if and (not (int .gpu.count)) (eq .cpu.threadsBind "auto") (ge (int .cpu.reserved) (int .cpu.cores)) -}}
{{- fail (printf "cpu.reserved=%d: must be below cpu.cores=%d" (int .cpu.reserved) (int .cpu.cores)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
