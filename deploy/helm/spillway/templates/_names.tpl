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
{{- $surge := dig "rollingUpdate" "maxSurge" 0 (.updateStrategy | default dict) | toString }}
{{- if not (has $surge (list "0" "0%")) }}
{{- fail (printf "updateStrategy.rollingUpdate.maxSurge: %s: a node has the ports of one agent only, so the second Pod would wait forever: set maxUnavailable instead; Services are served while an agent restarts" $surge) }}
{{- end }}
{{- if and (eq .mode "replace") (not .k8sServiceHost) }}
{{- fail "k8sServiceHost is not set: with mode: replace the Service \"kubernetes\" does not work before the agent runs: set k8sServiceHost and k8sServicePort to an address of the API server that is no Service, such as the one that your kubeconfig names" }}
{{- end }}
{{- if regexMatch "^[^:]+:[0-9]+$|^\\[.*\\]:[0-9]+$|/" (.k8sServiceHost | default "") }}
{{- fail (printf "k8sServiceHost: %s: an address or a host name is wanted: put the port into k8sServicePort" .k8sServiceHost) }}
{{- end }}
{{- if and (has "--conntrack-autopilot=on" .extraArgs) (not .privileged) }}
{{- fail "extraArgs: --conntrack-autopilot=on: /proc/sys is read-only in a container without privileges: set privileged: true" }}
{{- end }}
{{- end }}
{{- if eq (include "spillway.healthzPort" .) (include "spillway.metricsPort" .) }}
{{- fail (printf "healthz.port and metrics.port are both %s: set one to another port" (include "spillway.metricsPort" .)) }}
{{- end }}
{{- include "spillway.checkReleases" . }}
{{- end }}

{{- /* Agents of two releases on one node would write the same rules. Node selectors that
ask for two values of one label keep them apart; affinities may do so too. */ -}}
{{- define "spillway.checkReleases" -}}
{{- range (lookup "apps/v1" "DaemonSet" "" "").items }}
{{- $other := .metadata }}
{{- $pod := .spec.template.spec }}
{{- $own := and (eq $other.name $.Release.Name) (eq $other.namespace $.Release.Namespace) }}
{{- if and (eq (dig "labels" "app.kubernetes.io/name" "" $other) "spillway") (not $own) }}
{{- $apart := or $.Values.affinity $pod.affinity }}
{{- range $label, $value := $pod.nodeSelector }}
{{- if ne $value (get $.Values.nodeSelector $label | default $value) }}{{ $apart = true }}{{ end }}
{{- end }}
{{- if not $apart }}
{{- fail (printf "release %s in namespace %s already runs Spillway on these nodes, and a node can have one agent: upgrade or uninstall that release, or give both a nodeSelector that no node shares" $other.name $other.namespace) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Helm installs a CRD that is missing at the first install, and changes none later. */ -}}
{{- define "spillway.crdNote" -}}
{{- $wanted := .Files.Get "crds/donottrackpolicies.yaml" | fromYaml }}
{{- $name := $wanted.metadata.name }}
{{- if (lookup "v1" "Namespace" "" .Release.Namespace) }}
{{- $versions := list }}
{{- range dig "spec" "versions" list (lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name) }}
{{- $versions = append $versions (toJson (pick . "name" "schema")) }}
{{- end }}
{{- if not (has (toJson (pick (index $wanted.spec.versions 0) "name" "schema")) $versions) }}
The CRD {{ $name }} is missing or of another version, and Helm does not upgrade CRDs:
  helm show crds CHART | kubectl apply -f -
{{- end }}
{{- end }}
{{- end }}
