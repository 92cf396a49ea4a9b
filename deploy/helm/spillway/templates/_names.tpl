{{- /* Name of the objects. Two of a chart's dependencies may be this chart, with an alias each. */ -}}
{{- define "spillway.fullname" -}}
{{- $release := .Release.Name }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if and .Values.nameOverride (not (contains .Values.nameOverride $release)) }}
{{- printf "%s-%s" $release .Values.nameOverride }}
{{- else }}
{{- $release }}
{{- end }}
{{- end }}

{{- /* Name of objects without a namespace: releases in two namespaces may have one name. A
colon, which namespaces do not have, keeps it apart from all names of other objects. */ -}}
{{- define "spillway.clusterName" -}}
{{ include "spillway.fullname" . }}:{{ .Release.Namespace }}
{{- end }}

{{- /* The CLI and the alerts find agents by the name, the selectors of the objects by both. */ -}}
{{- define "spillway.labels" -}}
app.kubernetes.io/name: spillway
app.kubernetes.io/instance: {{ include "spillway.fullname" . }}
{{- end }}

{{- define "spillway.image" -}}
{{- include "spillway.checkImage" . -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Beside kube-proxy its ports are taken: both are in the node's network. */ -}}
{{- define "spillway.healthzPort" -}}
{{ (.Values.healthz).port | default (eq .Values.mode "beside" | ternary 10356 10256) }}
{{- end }}

{{- define "spillway.metricsPort" -}}
{{ (.Values.metrics).port | default (eq .Values.mode "beside" | ternary 10349 10249) }}
{{- end }}

{{- define "spillway.healthzAddress" -}}
{{ (.Values.healthz).bindAddress | default "0.0.0.0" }}
{{- end }}

{{- define "spillway.metricsAddress" -}}
{{ (.Values.metrics).bindAddress | default "127.0.0.1" }}
{{- end }}

{{- /* "any" for 0.0.0.0 and ::, "loopback" for loopback addresses, in all spellings; else "". */ -}}
{{- define "spillway.scope" -}}
{{- $v4 := regexReplaceAll "^[0:]*:(?i:ffff):" . "" }}
{{- if or (eq $v4 "0.0.0.0") (regexMatch "^[0:]+$" .) -}}
any
{{- else if or (hasPrefix "127." $v4) (regexMatch "^[0:]*:0{0,3}1$" .) (regexMatch "^[0:]*:(?i:ffff):0*7[fF][0-9a-fA-F]{2}:[0-9a-fA-F]+$" .) -}}
loopback
{{- end }}
{{- end }}

{{- /* Where the kubelet probes: the Pod's address, unless the agent listens elsewhere. The
Pod has the node's network, so the kubelet reaches its loopback. */ -}}
{{- define "spillway.probe" -}}
{{- $address := include "spillway.healthzAddress" . -}}
{{ if ne (include "spillway.scope" $address) "any" }}host: {{ $address | quote }}, {{ end }}port: healthz
{{- end }}

{{- define "spillway.proxyMode" -}}
{{ .Values.proxyMode | default "ebpf" }}
{{- end }}

{{- /* IP:port, with brackets around IPv6. */ -}}
{{- define "spillway.bind" -}}
{{ if contains ":" .address }}[{{ .address }}]{{ else }}{{ .address }}{{ end }}:{{ .port }}
{{- end }}

{{- /* "true" for an IP address. Of IPv6 with dots, the agent checks the rest. */ -}}
{{- define "spillway.isAddress" -}}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" }}
{{- $group := "[0-9a-fA-F]{1,4}" }}
{{- $groups := regexFindAll $group . -1 | len }}
{{- if not (contains ":" .) }}
{{- regexMatch (printf "^(%s\\.){3}%s$" $octet $octet) . }}
{{- else if contains "." . }}
{{- regexMatch "^[0-9a-fA-F:]+:[0-9.]+$" . }}
{{- else if contains "::" . }}
{{- and (lt $groups 8) (regexMatch (printf "^(%s(:%s)*)?::(%s(:%s)*)?$" $group $group $group $group) .) }}
{{- else }}
{{- regexMatch (printf "^(%s:){7}%s$" $group $group) . }}
{{- end }}
{{- end }}

{{- /* Why a string is no address range, "" if it is one. */ -}}
{{- define "spillway.cidrError" -}}
{{- $parts := splitList "/" . }}
{{- $bits := contains ":" . | ternary 128 32 }}
{{- $length := last $parts }}
{{- if or (ne (len $parts) 2) (ne (include "spillway.isAddress" (first $parts)) "true") -}}
not an address range such as 10.244.0.0/16 or fd00::/48
{{- else if or (not (regexMatch "^(0|[1-9][0-9]{0,2})$" $length)) (gt (int $length) $bits) -}}
the length after / is from 0 to {{ $bits }}
{{- else if not (contains ":" .) }}
{{- $size := 1 }}
{{- range until (int (sub 32 $length)) }}{{ $size = mul $size 2 }}{{ end }}
{{- $number := 0 }}
{{- range splitList "." (first $parts) }}{{ $number = add (mul $number 256) . }}{{ end }}
{{- if mod $number $size }}
{{- $start := sub $number (mod $number $size) -}}
bits are set after the length: write {{ div $start 16777216 }}.{{ mod (div $start 65536) 256 }}.{{ mod (div $start 256) 256 }}.{{ mod $start 256 }}/{{ $length }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Values that the agent would refuse: it would restart again and again. */ -}}
{{- define "spillway.checkAddresses" -}}
{{- range $name, $list := dict "clusterCIDR" .Values.clusterCIDR "nodePortAddresses" .Values.nodePortAddresses "egress.addresses" (.Values.egress).addresses }}
{{- if and $list (kindIs "string" $list) }}
{{- fail (printf "%s: %s: a list is wanted: --set '%s={%s}', or %s: [%s] in a file" $name $list $name $list $name $list) }}
{{- end }}
{{- range $list | default list }}
{{- $why := include "spillway.cidrError" . }}
{{- if and $why (ne . "primary") }}
{{- fail (printf "%s: %s: %s" $name . $why) }}
{{- end }}
{{- end }}
{{- if and (has "primary" ($list | default list)) (gt (len $list) 1) }}
{{- fail (printf "%s: primary stands alone: remove it, or the ranges" $name) }}
{{- end }}
{{- end }}
{{- range $name, $address := dict "healthz.bindAddress" (.Values.healthz).bindAddress "metrics.bindAddress" (.Values.metrics).bindAddress "api.bindAddress" (.Values.api).bindAddress }}
{{- if and $address (ne (include "spillway.isAddress" $address) "true") }}
{{- $alone := regexReplaceAll "^\\[([^\\]]*)\\](:[0-9]*)?$|^([0-9.]+):[0-9]*$" $address "$1$3" }}
{{- if eq (include "spillway.isAddress" $alone) "true" }}
{{- fail (printf "%s: %s: an address alone is wanted: write %s, and the port into %s" $name $address $alone (replace "bindAddress" "port" $name)) }}
{{- end }}
{{- fail (printf "%s: %s: not an IP address such as 0.0.0.0 or ::" $name $address) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The kubelet would report a bad name only on the nodes (InvalidImageName). */ -}}
{{- define "spillway.checkImage" -}}
{{- with .Values.image }}
{{- $host := "[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?" }}
{{- $registry := printf "(%s(\\.%s)*|\\[[0-9a-fA-F:]+\\])(:[0-9]{1,5})?/" $host $host }}
{{- $part := "[a-z0-9]+((\\.|_|__|-+)[a-z0-9]+)*" }}
{{- if contains "://" .repository }}
{{- fail (printf "image.repository: %s: write it without %s://" .repository (splitList "://" .repository | first)) }}
{{- else if contains "@" .repository }}
{{- fail (printf "image.repository: %s: put the digest into image.digest" .repository) }}
{{- else if contains ":" (splitList "/" .repository | last) }}
{{- fail (printf "image.repository: %s: put the tag into image.tag" .repository) }}
{{- else if or (gt (len .repository) 255) (not (regexMatch (printf "^(%s)?%s(/%s)*$" $registry $part $part) .repository)) }}
{{- fail (printf "image.repository: %s: not a repository such as registry.example.com/spillway, in lower case" .repository) }}
{{- end }}
{{- if and .tag (not (regexMatch "^[a-zA-Z0-9_][-a-zA-Z0-9_.]{0,127}$" .tag)) }}
{{- fail (printf "image.tag: %s: not a tag: letters, digits, '_', '.' and '-', at most 128; a digest belongs into image.digest" .tag) }}
{{- end }}
{{- if and .digest (not (regexMatch "^sha256:[0-9a-f]{64}$" .digest)) }}
{{- fail (printf "image.digest: %s: not a digest: sha256: and 64 digits from 0 to f" .digest) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Where the agent reaches the API server. On "helm install", not on "helm template",
the addresses of the Service kubernetes are known. */ -}}
{{- define "spillway.checkHost" -}}
{{- with .Values.k8sServiceHost }}
{{- if regexMatch "^[^:]+:[0-9]+$|^\\[.*\\]:[0-9]+$|/" . }}
{{- fail (printf "k8sServiceHost: %s: an address or a host name is wanted: put the port into k8sServicePort" .) }}
{{- else if or (contains ":" .) (regexMatch "(^|\\.)[0-9]+$" .) }}
{{- if or (ne (include "spillway.isAddress" .) "true") (has . (list "0.0.0.0" "::")) }}
{{- fail (printf "k8sServiceHost: %s: not the address of a host, such as 192.168.0.10" .) }}
{{- end }}
{{- else if or (gt (len .) 253) (not (regexMatch "^([a-zA-Z0-9_]([-a-zA-Z0-9_]{0,61}[a-zA-Z0-9_])?(\\.|$))+$" .)) }}
{{- fail (printf "k8sServiceHost: %s: neither an address nor a host name" .) }}
{{- end }}
{{- if eq $.Values.mode "replace" }}
{{- $service := dig "spec" "clusterIPs" list (lookup "v1" "Service" "default" "kubernetes") }}
{{- if or (has . $service) (regexMatch "(?i)^kubernetes\\.default(\\.svc(\\.|$)|\\.?$)" .) }}
{{- fail (printf "k8sServiceHost: %s: this is the Service \"kubernetes\", which does not work before the agent runs: set an address of the API server that is no Service, such as the one that your kubeconfig names" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The nanoseconds of a duration; "" for a string that is none, or too long a one. */ -}}
{{- define "spillway.nanoseconds" -}}
{{- if regexMatch "^([0-9]+(\\.[0-9]*)?(ns|us|ms|s|m|h))+$" . }}
{{- $start := toDate "2006-01-02" "2000-01-01" }}
{{- $n := ((dateModify . $start).Sub $start).Nanoseconds }}
{{- if or $n (not (regexMatch "[1-9]" .)) }}{{ $n }}{{ end }}
{{- end }}
{{- end }}

{{- define "spillway.checkConntrack" -}}
{{- $most := 53687088 }}
{{- $conntrack := .Values.conntrack | default dict }}
{{- range $name, $value := dict "maxPerCore" $conntrack.maxPerCore "min" $conntrack.min }}
{{- if and $value (gt (int64 $value) $most) }}
{{- fail (printf "conntrack.%s: %d: the kernel allows %d flows in all: choose a smaller number" $name (int64 $value) $most) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "spillway.checkDurations" -}}
{{- $ns := dict "syncPeriod" 30000000000 }}
{{- $conntrack := .Values.conntrack | default dict }}
{{- range $name, $value := dict
  "syncPeriod" .Values.syncPeriod "minSyncPeriod" .Values.minSyncPeriod "otlp.metricsInterval" (.Values.otlp).metricsInterval
  "conntrack.tcpTimeoutEstablished" $conntrack.tcpTimeoutEstablished
  "conntrack.tcpTimeoutCloseWait" $conntrack.tcpTimeoutCloseWait
  "conntrack.udpTimeout" $conntrack.udpTimeout
  "conntrack.udpTimeoutStream" $conntrack.udpTimeoutStream }}
{{- if $value }}
{{- $n := include "spillway.nanoseconds" $value }}
{{- if eq $n "" }}
{{- fail (printf "%s: %s: not a duration such as 500ms, 30s or 1h30m" $name $value) }}
{{- end }}
{{- $_ := set $ns $name (int64 $n) }}
{{- if and (hasPrefix "conntrack." $name) (gt (int64 $n) 0) (lt (int64 $n) 1000000000) }}
{{- fail (printf "%s: %s: write a second or longer, or 0s for the default" $name $value) }}
{{- end }}
{{- end }}
{{- end }}
{{- if lt (int64 (get $ns "otlp.metricsInterval" | default 1000000000)) 1000000000 }}
{{- fail (printf "otlp.metricsInterval: %s: write a second or longer" .Values.otlp.metricsInterval) }}
{{- end }}
{{- if eq (int64 $ns.syncPeriod) 0 }}
{{- fail (printf "syncPeriod: %s: must be longer than 0: remove it for the default of 30s" .Values.syncPeriod) }}
{{- end }}
{{- if gt (int64 (get $ns "minSyncPeriod" | default 0)) (int64 $ns.syncPeriod) }}
{{- fail (printf "minSyncPeriod: %s: longer than syncPeriod (%s): choose a shorter one" .Values.minSyncPeriod (.Values.syncPeriod | default "30s")) }}
{{- end }}
{{- end }}

{{- /* Flags of spillway.args, and the values that set them. */ -}}
{{- define "spillway.checkExtraArgs" -}}
{{- $values := dict "hostname-override" "" "bpffs" "" "drop-capabilities" "" "cgroup-root" "cgroupRoot" "proxy-mode" "proxyMode"
  "healthz-bind-address" "healthz" "metrics-bind-address" "metrics" "bind-address-hard-fail" "" "api-socket" "api.socket" "api-listen" "api" "api-tls-cert" "api.secretName" "api-tls-key" "api.secretName" "api-client-ca" "api.secretName" "bypass" "bypass" "detect-local-mode" "detectLocalMode"
  "log-format" "logFormat" "v" "logLevel" "service-proxy-name" "mode and serviceProxyName" "takeover" "takeover" "cleanup" "cleanup"
  "cluster-cidr" "clusterCIDR" "pod-bridge-interface" "podBridgeInterface" "pod-interface-name-prefix" "podInterfaceNamePrefix"
  "nodeport-addresses" "nodePortAddresses" "localhost-nodeports" "localhostNodePorts" "host-ports" "hostPorts" "allow-external-ips" "allowExternalIPs" "forwarding" "forwarding" "dsr-key-file" "forwardingSecretName" "dsr-port" "forwardingPort" "maglev-seed-file" "maglevSeedSecretName" "outlier-ejection" "outlierEjection" "balance-by-load" "balanceByLoad" "xdp" "xdp" "egress" "egress.mode" "egress-config" "egress.configMapName" "egress-addresses" "egress.addresses" "masquerade-all" "masqueradeAll" "socket-hooks" "socketHooks" "end-sockets" "endSockets" "profiling" "profiling"
  "conntrack-max-per-core" "conntrack.maxPerCore" "conntrack-min" "conntrack.min"
  "conntrack-tcp-timeout-established" "conntrack.tcpTimeoutEstablished" "conntrack-tcp-timeout-close-wait" "conntrack.tcpTimeoutCloseWait"
  "conntrack-udp-timeout" "conntrack.udpTimeout" "conntrack-udp-timeout-stream" "conntrack.udpTimeoutStream"
  "conntrack-tcp-be-liberal" "conntrack.tcpBeLiberal" "conntrack-autopilot" "conntrackAutopilot.mode" "conntrack-autopilot-memory" "conntrackAutopilot.memory"
  "flow-events" "flowEvents.mode" "flow-events-sample" "flowEvents.sample" "flow-events-rate" "flowEvents.rate" "service-metrics" "serviceMetrics"
  "iptables-sync-period" "syncPeriod" "iptables-min-sync-period" "minSyncPeriod"
  "otlp-endpoint" "otlp.endpoint" "otlp-signals" "otlp.signals" "otlp-metrics-interval" "otlp.metricsInterval" "otlp-insecure" "otlp.insecure"
  "otlp-ca-file" "otlp.secretKeys" "otlp-cert-file" "otlp.secretKeys" "otlp-key-file" "otlp.secretKeys" "otlp-headers-file" "otlp.secretKeys" }}
{{- range .Values.extraArgs }}
{{- if not (regexMatch "^--[a-z][-a-z0-9]*(=|$)" .) }}
{{- fail (printf "extraArgs: %s: not a flag: write each as --name=value" .) }}
{{- end }}
{{- $name := splitList "=" . | first | trimPrefix "--" }}
{{- if hasKey $values $name }}
{{- $value := get $values $name }}
{{- fail (printf "extraArgs: %s: the chart sets this flag: %s" . ($value | empty | ternary "remove it" (printf "set %s instead" $value))) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "spillway.checkNames" -}}
{{- $name := include "spillway.fullname" . }}
{{- if eq (toString .Values.enabled) "false" }}
{{- fail "enabled: false: only a chart that depends on this one can leave it out, with condition: spillway.enabled in its Chart.yaml" }}
{{- end }}
{{- if gt (len $name) 53 }}
{{- fail (printf "nameOverride: %s: with the release's name it has %d letters, and names of Pods have room for 53: set a shorter fullnameOverride" .Values.nameOverride (len $name)) }}
{{- end }}
{{- end }}

{{- /* What the schema cannot say in words that help. */ -}}
{{- define "spillway.check" -}}
{{- include "spillway.checkNames" . }}
{{- include "spillway.checkAddresses" . }}
{{- include "spillway.checkHost" . }}
{{- include "spillway.checkConntrack" . }}
{{- include "spillway.checkDurations" . }}
{{- include "spillway.checkExtraArgs" . }}
{{- range $label, $value := .Values.podLabels }}
{{- if has $label (list "app.kubernetes.io/name" "app.kubernetes.io/instance") }}
{{- fail (printf "podLabels: %s: the DaemonSet finds its Pods by this label: choose another name" $label) }}
{{- end }}
{{- end }}
{{- with .Values }}
{{- if and .loadModules (not .privileged) (eq .seccompProfile.type "Localhost") (eq (base .seccompProfile.localhostProfile) "spillway.json") }}
{{- fail "loadModules: true and seccompProfile.type: Localhost: spillway.json denies module loading: set seccompProfile.type: RuntimeDefault, or seccompProfile.localhostProfile to a profile of your own" }}
{{- end }}
{{- if and .takeover (eq .mode "beside") }}
{{- fail "takeover: true and mode: beside: beside kube-proxy nothing is taken over: set mode: replace, or takeover: false" }}
{{- end }}
{{- if and .localhostNodePorts (eq (include "spillway.proxyMode" $) "ebpf") (eq (toString .socketHooks) "off") }}
{{- fail "localhostNodePorts: true and socketHooks: off: only socket hooks serve NodePorts on loopback: choose one" }}
{{- end }}
{{- if has (toString .endSockets) (list "host" "all") }}
{{- if eq (toString .socketHooks) "off" }}
{{- fail (printf "endSockets: %s and socketHooks: off: only sockets that socket hooks translate end: choose one" .endSockets) }}
{{- end }}
{{- end }}
{{- if and (eq (toString .endSockets) "all") (not .sysAdmin) (not .privileged) }}
{{- fail "endSockets: all and sysAdmin: false: sockets of Pods need SYS_ADMIN: set sysAdmin: true, or endSockets: host" }}
{{- end }}
{{- if and .masqueradeAll (eq .bypass "never") }}
{{- fail "masqueradeAll: true and bypass: never: the agent cannot do both: choose one" }}
{{- end }}
{{- if and (eq (.detectLocalMode | default "") "BridgeInterface") (not .podBridgeInterface) }}
{{- fail "detectLocalMode: BridgeInterface: name the bridge in podBridgeInterface" }}
{{- end }}
{{- if and (eq (.detectLocalMode | default "") "InterfaceNamePrefix") (not .podInterfaceNamePrefix) }}
{{- fail "detectLocalMode: InterfaceNamePrefix: set podInterfaceNamePrefix" }}
{{- end }}
{{- if eq (include "spillway.scope" (include "spillway.metricsAddress" $)) "loopback" }}
{{- $why := printf "metrics.bindAddress: %s: Prometheus cannot reach loopback: set metrics.bindAddress: 0.0.0.0" (include "spillway.metricsAddress" $) }}
{{- if .podMonitor.enabled }}
{{- fail (printf "podMonitor.enabled: true and %s" $why) }}
{{- end }}
{{- if eq (get (.podAnnotations | default dict) "prometheus.io/scrape" | toString) "true" }}
{{- fail (printf "podAnnotations: prometheus.io/scrape: true and %s" $why) }}
{{- end }}
{{- end }}
{{- if and (.podMonitor.kubeProxy).enabled (not .podMonitor.enabled) }}
{{- fail "podMonitor.kubeProxy.enabled: true and podMonitor.enabled: false: set podMonitor.enabled: true too" }}
{{- end }}
{{- if hasKey ((.podMonitor.kubeProxy).labels | default dict) "job" }}
{{- fail "podMonitor.kubeProxy.labels: job: set podMonitor.kubeProxy.job instead" }}
{{- end }}
{{- $surge := dig "rollingUpdate" "maxSurge" 0 (.updateStrategy | default dict) | toString }}
{{- if not (has $surge (list "0" "0%")) }}
{{- fail (printf "updateStrategy.rollingUpdate.maxSurge: %s: a node has the ports of one agent only, so the second Pod would wait forever: set maxUnavailable instead; Services are served while an agent restarts" $surge) }}
{{- end }}
{{- if and (eq .mode "replace") (not .k8sServiceHost) }}
{{- fail "k8sServiceHost is not set: with mode: replace the Service \"kubernetes\" does not work before the agent runs: set k8sServiceHost and k8sServicePort to an address of the API server that is no Service, such as the one that your kubeconfig names" }}
{{- end }}
{{- if and (eq (toString (.conntrackAutopilot).mode) "on") (not .privileged) }}
{{- fail "conntrackAutopilot.mode: on: /proc/sys is read-only in a container without privileges: set privileged: true" }}
{{- end }}
{{- end }}
{{- if eq (include "spillway.healthzPort" .) (include "spillway.metricsPort" .) }}
{{- fail (printf "healthz.port and metrics.port are both %s: set one to another port" (include "spillway.metricsPort" .)) }}
{{- end }}
{{- if and (.Values.api).bindAddress (not .Values.api.secretName) }}
{{- fail "api.bindAddress without api.secretName: the API is served on TCP with mTLS only: name a Secret with tls.crt, tls.key and ca.crt" }}
{{- end }}
{{- with .Values.otlp }}
{{- if and .endpoint (not (regexMatch "^https?://[^/@?#]+(/[^?#@]*)?$" .endpoint)) }}
{{- fail "otlp.endpoint: not an address: write https://HOST:4318, and credentials into a Secret" }}
{{- end }}
{{- if and .endpoint (hasPrefix "http://" .endpoint) (not .insecure) (not (regexMatch "^http://(127[.][0-9.]+|localhost|[[]::1[]])(:[0-9]+)?(/|$)" .endpoint)) }}
{{- fail (printf "otlp.endpoint: %s: neither encrypted nor authenticated: write https://, or set otlp.insecure: true" .endpoint) }}
{{- end }}
{{- if and .secretKeys (not .secretName) }}
{{- fail "otlp.secretKeys without otlp.secretName: name the Secret that has them" }}
{{- end }}
{{- if and .secretName (not .secretKeys) }}
{{- fail "otlp.secretName without otlp.secretKeys: list those of ca.crt, tls.crt and headers that it has" }}
{{- end }}
{{- end }}
{{- if and (has (toString .Values.forwarding) (list "hybrid" "dsr")) (not .Values.forwardingSecretName) }}
{{- fail (printf "forwarding: %s: set forwardingSecretName too, to a Secret with the key secret" .Values.forwarding) }}
{{- end }}
{{- if and .Values.forwardingSecretName (ne (include "spillway.proxyMode" .) "ebpf") }}
{{- fail "forwardingSecretName: only proxyMode: ebpf forwards without SNAT" }}
{{- end }}
{{- if and (.Values.egress).configMapName (ne (toString .Values.egress.mode) "on") }}
{{- fail "egress.configMapName has no meaning without egress.mode: on: set it, or leave the name out" }}
{{- end }}
{{- if and (.Values.egress).addresses (not (has (toString .Values.egress.mode) (list "auto" "on"))) }}
{{- fail "egress.addresses has no meaning with egress.mode: off: set it to auto or on, or leave the addresses out" }}
{{- end }}
{{- if and .Values.maglevSeedSecretName (ne (include "spillway.proxyMode" .) "ebpf") }}
{{- fail "maglevSeedSecretName: only proxyMode: ebpf has tables of maglev" }}
{{- end }}
{{- if and (eq (toString .Values.xdp) "auto") (ne (include "spillway.proxyMode" .) "ebpf") }}
{{- fail "xdp: auto: only proxyMode: ebpf has an XDP program" }}
{{- end }}
{{- if and .Values.forwardingSecretName .Values.masqueradeAll }}
{{- fail "forwardingSecretName and masqueradeAll: endpoints get either the client's address or the node's: set one of them" }}
{{- end }}
{{- include "spillway.checkReleases" . }}
{{- end }}

{{- /* Agents of two releases on one node would write the same rules. Node selectors that
ask for two values of one label keep them apart; affinities may do so too. */ -}}
{{- define "spillway.checkReleases" -}}
{{- range (lookup "apps/v1" "DaemonSet" "" "").items }}
{{- $other := .metadata }}
{{- $pod := .spec.template.spec }}
{{- $own := and (eq $other.name (include "spillway.fullname" $)) (eq $other.namespace $.Release.Namespace) }}
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
