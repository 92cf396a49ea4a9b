{{- /* The agent's command line. */ -}}
{{- define "spillway.args" -}}
{{- include "spillway.check" . -}}
- agent
- --hostname-override=$(NODE_NAME)
- --proxy-mode={{ include "spillway.proxyMode" . }}
- --cgroup-root=/host/cgroup
- --bpffs=/sys/fs/bpf/spillway
- --healthz-bind-address={{ include "spillway.bind" (dict "address" (include "spillway.healthzAddress" .) "port" (include "spillway.healthzPort" .)) }}
- --metrics-bind-address={{ include "spillway.bind" (dict "address" (include "spillway.metricsAddress" .) "port" (include "spillway.metricsPort" .)) }}
{{- if not .Values.takeover }}{{- /* the kubelet would probe the program that has the port */}}
- --bind-address-hard-fail
{{- end }}
{{- if eq (toString (.Values.api).socket) "false" }}
- --api-socket=
{{- end }}
{{- with (.Values.api).bindAddress }}
- --api-listen={{ include "spillway.bind" (dict "address" . "port" (toString ($.Values.api.port | default 10261))) }}
- --api-tls-cert=/etc/spillway/api/tls.crt
- --api-tls-key=/etc/spillway/api/tls.key
- --api-client-ca=/etc/spillway/api/ca.crt
{{- end }}
{{- if (.Values.otlp).endpoint }}
{{- with .Values.otlp }}
- --otlp-endpoint={{ .endpoint }}
{{- with .signals }}
- --otlp-signals={{ join "," . }}
{{- end }}
{{- with .metricsInterval }}
- --otlp-metrics-interval={{ . }}
{{- end }}
{{- if .insecure }}
- --otlp-insecure
{{- end }}
{{- if has "ca.crt" (.secretKeys | default list) }}
- --otlp-ca-file=/etc/spillway/otlp/ca.crt
{{- end }}
{{- if has "tls.crt" (.secretKeys | default list) }}
- --otlp-cert-file=/etc/spillway/otlp/tls.crt
- --otlp-key-file=/etc/spillway/otlp/tls.key
{{- end }}
{{- if has "headers" (.secretKeys | default list) }}
- --otlp-headers-file=/etc/spillway/otlp/headers
{{- end }}
{{- end }}
{{- end }}
- --bypass={{ .Values.bypass | default "auto" }}
- --detect-local-mode={{ .Values.detectLocalMode | default "ClusterCIDR" }}
- --log-format={{ .Values.logFormat | default "text" }}
- --v={{ .Values.logLevel | default 0 }}
{{- with .Values }}
{{- if eq .mode "beside" }}
- --service-proxy-name={{ .serviceProxyName }}
{{- end }}
{{- if .takeover }}
- --takeover=kube-proxy
{{- end }}
{{- if and (eq (include "spillway.proxyMode" $) "ebpf") (not .privileged) (ne (toString .endSockets) "all") }}
- --drop-capabilities
{{- end }}
{{- with .clusterCIDR }}
- --cluster-cidr={{ join "," . }}
{{- end }}
{{- with .podBridgeInterface }}
- --pod-bridge-interface={{ . }}
{{- end }}
{{- with .podInterfaceNamePrefix }}
- --pod-interface-name-prefix={{ . }}
{{- end }}
{{- with .nodePortAddresses }}
- --nodeport-addresses={{ join "," . }}
{{- end }}
{{- if .localhostNodePorts }}
- --localhost-nodeports
{{- end }}
{{- if .hostPorts }}
- --host-ports
{{- end }}
{{- if eq (toString .allowExternalIPs) "false" }}
- --allow-external-ips=false
{{- end }}
{{- if .forwardingSecretName }}
- --dsr-key-file=/etc/spillway/forwarding/secret
{{- if not (has (toString .forwardingPort) (list "6080" "" "<nil>")) }}
- --dsr-port={{ .forwardingPort }}
{{- end }}
{{- end }}
{{- if .maglevSeedSecretName }}
- --maglev-seed-file=/etc/spillway/maglev/seed
{{- end }}
{{- if .outlierEjection }}
- --outlier-ejection
{{- end }}
{{- if .balanceByLoad }}
- --balance-by-load
{{- end }}
{{- if has (toString .forwarding) (list "hybrid" "dsr") }}
- --forwarding={{ .forwarding }}
{{- end }}
{{- if eq (toString .xdp) "auto" }}
- --xdp=auto
{{- end }}
{{- if has (toString (.egress).mode) (list "auto" "on") }}
- --egress={{ .egress.mode }}
{{- if .egress.configMapName }}
- --egress-config=/etc/spillway/egress/config
{{- end }}
{{- with .egress.addresses }}
- --egress-addresses={{ join "," . }}
{{- end }}
{{- end }}
{{- if .masqueradeAll }}
- --masquerade-all
{{- end }}
{{- if not (has (toString .socketHooks) (list "" "all" "<nil>")) }}
- --socket-hooks={{ .socketHooks }}
{{- end }}
{{- if has (toString .endSockets) (list "host" "all") }}
- --end-sockets
{{- end }}
{{- if .profiling }}
- --profiling
{{- end }}
{{- if (.conntrack).tcpBeLiberal }}
- --conntrack-tcp-be-liberal
{{- end }}
{{- range $flag, $value := dict
  "conntrack-max-per-core" (.conntrack).maxPerCore
  "conntrack-min" (.conntrack).min
  "conntrack-tcp-timeout-established" (.conntrack).tcpTimeoutEstablished
  "conntrack-tcp-timeout-close-wait" (.conntrack).tcpTimeoutCloseWait
  "conntrack-udp-timeout" (.conntrack).udpTimeout
  "conntrack-udp-timeout-stream" (.conntrack).udpTimeoutStream
  "conntrack-autopilot" (.conntrackAutopilot).mode
  "conntrack-autopilot-memory" (.conntrackAutopilot).memory
  "flow-events" (.flowEvents).mode
  "flow-events-sample" (.flowEvents).sample
  "flow-events-rate" (.flowEvents).rate
  "service-metrics" .serviceMetrics
  "iptables-sync-period" .syncPeriod
  "iptables-min-sync-period" .minSyncPeriod }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- --{{ $flag }}={{ if kindIs "string" $value }}{{ $value }}{{ else }}{{ int64 $value }}{{ end }}
{{- end }}
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /*
Capabilities of the agent, as measured by test/privilege. In every mode:

  NET_ADMIN      devices and their hooks, routes, nf_tables, iptables, conntrack
  NET_RAW        iptables-legacy talks to the kernel through a raw socket: to write
                 its rules, and in the other modes to remove those of an earlier mode
  BPF            maps and programs; in the other modes to remove those of an earlier
                 mode, for which seccomp's RuntimeDefault and kernels before 5.19 want it

In addition for proxyMode ebpf:

  NET_BROADCAST  rtnetlink events of pods' network namespaces (NETLINK_LISTEN_ALL_NSID);
                 without it the agent notices a pod's new address up to 30 s late
  PERFMON        the verifier accepts loops and pointer arithmetic
  SYS_ADMIN      only with sysAdmin: true: where nf_conntrack is a module, the kernel
                 gives its BTF to no other process (BPF_BTF_GET_FD_BY_ID)

The agent drops the last two as soon as its programs are loaded (--drop-capabilities), except
with endSockets: all: SYS_ADMIN enters the network namespaces of Pods to end their sockets.

Not needed: SYS_RESOURCE (maps are not locked memory since Linux 5.11), SYS_PTRACE (a
running kube-proxy is found without it), SYS_MODULE (the kernel loads modules by itself,
but for loadModules). The user is root, since bpffs, /run/xtables.lock and the
cgroup file system belong to root and there is no DAC_OVERRIDE.
*/ -}}
{{- define "spillway.securityContext" -}}
{{- if .Values.privileged -}}
privileged: true
{{- else -}}
privileged: false
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  add:
    - BPF
    - NET_ADMIN
    - NET_RAW
    {{- if eq (include "spillway.proxyMode" .) "ebpf" }}
    - NET_BROADCAST
    - PERFMON
    {{- if .Values.sysAdmin }}
    - SYS_ADMIN
    {{- end }}
    {{- end }}
    {{- if .Values.loadModules }}
    - SYS_MODULE
    {{- end }}
    {{- range .Values.extraCapabilities }}
    - {{ trimPrefix "CAP_" . }}
    {{- end }}
{{- /* The usual AppArmor profile denies writes below /sys/fs/bpf. */}}
appArmorProfile:
  type: Unconfined
seccompProfile:
  type: {{ .Values.seccompProfile.type }}
  {{- if eq .Values.seccompProfile.type "Localhost" }}
  localhostProfile: {{ .Values.seccompProfile.localhostProfile }}
  {{- end }}
{{- with .Values.seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
runAsUser: 0
readOnlyRootFilesystem: true
{{- end }}

{{- /* Where on the node the agent works. */ -}}
{{- define "spillway.volumeMounts" -}}
- name: bpffs # pins: a restart loses nothing
  mountPath: /sys/fs/bpf
  # If the agent itself has to mount it, the node must see that; Kubernetes allows it
  # to privileged containers only. Otherwise the agent must see what the node mounts.
  mountPropagation: {{ and .Values.privileged (not .Values.bpffs.autoMount) | ternary "Bidirectional" "HostToContainer" }}
- name: cgroup # the node's: a container's own is but its own processes'
  mountPath: /host/cgroup
  readOnly: true
- name: run # the lock that keeps a second agent away, and the API's socket
  mountPath: /run/spillway
- name: xtables-lock # shared with other programs on this node that call iptables
  mountPath: /run/xtables.lock
{{- if (.Values.api).bindAddress }}
- name: api # a mount of the whole Secret, which follows its changes
  mountPath: /etc/spillway/api
  readOnly: true
{{- end }}
{{- if and (.Values.otlp).endpoint (.Values.otlp).secretName }}
- name: otlp
  mountPath: /etc/spillway/otlp
  readOnly: true
{{- end }}
{{- if .Values.forwardingSecretName }}
- name: forwarding
  mountPath: /etc/spillway/forwarding
  readOnly: true
{{- end }}
{{- if (.Values.egress).configMapName }}
- name: egress
  mountPath: /etc/spillway/egress
  readOnly: true
{{- end }}
{{- if .Values.maglevSeedSecretName }}
- name: maglev
  mountPath: /etc/spillway/maglev
  readOnly: true
{{- end }}
{{- if eq (toString .Values.endSockets) "all" }}
- name: netns # of Pods, to end their sockets
  mountPath: /run/netns
  mountPropagation: HostToContainer
  readOnly: true
{{- end }}
{{- if .Values.loadModules }}
- name: modules
  mountPath: /lib/modules
  readOnly: true
{{- end }}
{{- end }}
