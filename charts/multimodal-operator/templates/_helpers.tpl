{{- define "operator.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "operator.selector" -}}
app.kubernetes.io/name: multimodal-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: multimodal-operator
{{- end -}}

{{- define "operator.subjects" -}}
- kind: ServiceAccount
  name: {{ include "operator.name" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}
