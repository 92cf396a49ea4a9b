{{- /* The agent's command line. */ -}}
{{- define "spillway.args" -}}
{{- include "spillway.check" . -}}
- agent
- --hostname-override=$(NODE_NAME)
- --proxy-mode={{ .Values.proxyMode }}
- --cgroup-root=/host/cgroup
- --bpffs=/sys/fs/bpf/spillway
- --healthz-bind-address={{ include "spillway.bind" (dict "address" .Values.healthz.bindAddress "port" (include "spillway.healthzPort" .)) }}
- --metrics-bind-address={{ include "spillway.bind" (dict "address" .Values.metrics.bindAddress "port" (include "spillway.metricsPort" .)) }}
- --bypass={{ .Values.bypass }}
- --detect-local-mode={{ .Values.detectLocalMode }}
- --log-format={{ .Values.logFormat }}
- --v={{ .Values.logLevel }}
{{- with .Values }}
{{- if eq .mode "beside" }}
- --service-proxy-name={{ .serviceProxyName }}
{{- end }}
{{- if .takeover }}
- --takeover=kube-proxy
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
{{- if .masqueradeAll }}
- --masquerade-all
{{- end }}
{{- if .profiling }}
- --profiling
{{- end }}
{{- range $flag, $value := dict
  "conntrack-max-per-core" .conntrack.maxPerCore
  "conntrack-min" .conntrack.min
  "conntrack-tcp-timeout-established" .conntrack.tcpTimeoutEstablished
  "conntrack-tcp-timeout-close-wait" .conntrack.tcpTimeoutCloseWait
  "conntrack-udp-timeout" .conntrack.udpTimeout
  "conntrack-udp-timeout-stream" .conntrack.udpTimeoutStream
  "iptables-sync-period" .syncPeriod
  "iptables-min-sync-period" .minSyncPeriod }}
{{- if not (kindIs "invalid" $value) }}
- --{{ $flag }}={{ if kindIs "string" $value }}{{ $value }}{{ else }}{{ int64 $value }}{{ end }}
{{- end }}
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /*
What the agent may do. Every mode also takes away what another mode left
(after a change of proxyMode), hence some of these in each.

  NET_ADMIN      routes, devices and their hooks, nf_tables, conntrack entries
  NET_RAW        iptables-legacy speaks with the kernel through a raw socket
  BPF            maps and programs, also those to take away

and for proxyMode ebpf:

  SYS_ADMIN      the types of nf_conntrack where that is a module: programs ask for
                 connections by its function (BPF_BTF_GET_FD_BY_ID), so that what
                 netfilter translates is left to it; and hooks whose pin somebody has
                 removed (BPF_LINK_GET_FD_BY_ID)
  NET_BROADCAST  news of devices in pods' namespaces (NETLINK_LISTEN_ALL_NSID);
                 without it pods are found late
  PERFMON        the verifier lets programs with loops and pointer arithmetic pass

with takeover:

  SYS_PTRACE     which network namespace a process with more capabilities is in, as
                 kube-proxy has them (/proc/PID/ns/net)
  SYS_ADMIN      setns(2), into the namespaces of pods, which hostPID shows: the metrics
                 of their conntrack

SYS_RESOURCE is not among them: since Linux 5.11 maps are not locked memory, and 5.15
is needed anyway. Nor is SYS_MODULE: what nf_tables and a legacy iptables that is in
use lack, the kernel loads by itself.
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
    {{- if or (eq .Values.proxyMode "ebpf") .Values.takeover }}
    - SYS_ADMIN
    {{- end }}
    {{- if eq .Values.proxyMode "ebpf" }}
    - NET_BROADCAST
    - PERFMON
    {{- end }}
    {{- if .Values.takeover }}
    - SYS_PTRACE
    {{- end }}
    {{- if .Values.loadModules }}
    - SYS_MODULE
    {{- end }}
    {{- range .Values.extraCapabilities }}
    - {{ . }}
    {{- end }}
{{- /* The usual AppArmor profile forbids to write below /sys/fs/bpf, and Docker's
seccomp profile forbids bpf(2) without SYS_ADMIN, whatever the capabilities. */}}
appArmorProfile:
  type: Unconfined
seccompProfile:
  type: Unconfined
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
- name: run # the lock that keeps a second agent away
  mountPath: /run/spillway
- name: xtables-lock # shared with whoever else calls iptables on this node
  mountPath: /run/xtables.lock
{{- if .Values.loadModules }}
- name: modules
  mountPath: /lib/modules
  readOnly: true
{{- end }}
{{- end }}
