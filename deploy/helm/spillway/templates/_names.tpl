{{- define "spillway.labels" -}}
app.kubernetes.io/name: spillway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "spillway.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Beside kube-proxy its ports are taken: both are in the node's network. */ -}}
{{- define "spillway.healthzPort" -}}
{{ .Values.healthz.port | default (eq .Values.mode "beside" | ternary 10356 10256) }}
{{- end }}

{{- define "spillway.metricsPort" -}}
{{ .Values.metrics.port | default (eq .Values.mode "beside" | ternary 10349 10249) }}
{{- end }}

{{- /* IP:port, with brackets around IPv6. */ -}}
{{- define "spillway.bind" -}}
{{ if contains ":" .address }}[{{ .address }}]{{ else }}{{ .address }}{{ end }}:{{ .port }}
{{- end }}

{{- /* What the schema cannot say in words that help. */ -}}
{{- define "spillway.check" -}}
{{- with .Values }}
{{- if and .takeover (eq .mode "beside") }}
{{- fail "takeover: true and mode: beside: beside kube-proxy nothing is taken over: set mode: replace, or takeover: false" }}
{{- end }}
{{- if and .masqueradeAll (eq .bypass "never") }}
{{- fail "masqueradeAll: true and bypass: never: the agent cannot do both: choose one" }}
{{- end }}
{{- if and (eq .detectLocalMode "BridgeInterface") (not .podBridgeInterface) }}
{{- fail "detectLocalMode: BridgeInterface: name the bridge in podBridgeInterface" }}
{{- end }}
{{- if and (eq .detectLocalMode "InterfaceNamePrefix") (not .podInterfaceNamePrefix) }}
{{- fail "detectLocalMode: InterfaceNamePrefix: set podInterfaceNamePrefix" }}
{{- end }}
{{- if and .podMonitor.enabled (or (hasPrefix "127." .metrics.bindAddress) (eq .metrics.bindAddress "::1")) }}
{{- fail (printf "podMonitor.enabled: true and metrics.bindAddress: %s: Prometheus cannot reach loopback: set metrics.bindAddress: 0.0.0.0" .metrics.bindAddress) }}
{{- end }}
{{- end }}
{{- end }}
