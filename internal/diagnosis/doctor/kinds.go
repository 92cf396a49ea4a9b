package doctor

import (
	"slices"
	"strings"
)

// Kind describes the findings of one ID, for documents and completion. The texts are
// Markdown.
type Kind struct {
	ID       string
	Check    Check  // that reports it
	Severity string // and when
	Effect   string // effect on packets, then the cause
	Remedy   string
	Fixable  bool // --fix may apply the remedy
}

// site has the documents: site_url of mkdocs.yml.
const site = "https://spillway.dev/docs/"

// Document returns the path of the runbook below docs/.
func (k Kind) Document() string { return "runbooks/" + k.ID + ".md" }

// documentation returns the address of the runbook of findings with an id.
func documentation(id string) string {
	return site + strings.TrimSuffix(Kind{ID: id}.Document(), ".md") + "/"
}

// Kinds lists the kinds of findings, in the order of Checks.
var Kinds = []Kind{
	{"conntrack-table-full", conntrackTableFull{}, "critical from 95 % on, or when it drops; warning from 80 % on, or when it evicts",
		"New connections are dropped, or will be.", "Raise `nf_conntrack_max` and `nf_conntrack_buckets`.", true},
	{"conntrack-table-was-full", conntrackTableFull{}, "info, if a namespace has counted drops or could not be read",
		"New connections were dropped. The kernel's log has it, within the last hour.", "Raise the same sizes before the next peak.", false},
	{"expectation-table-full", expectationTableFull{}, "critical from 95 % on, warning from 80 % on",
		"Requests of TFTP and FTP are dropped.", "Raise `nf_conntrack_expect_max`.", true},
	{"expectation-table-was-full", expectationTableFull{}, "info, if a namespace has a helper or could not be read",
		"Requests of TFTP and FTP were dropped. The kernel's log has it, within the last hour.", "Raise `nf_conntrack_expect_max`.", false},
	{"snat-ports-exhausted", snatPortsExhausted{},
		"critical from 95 % on if connections failed, and from 80 % on while they fail; else warning from 80 % on",
		"New connections to one destination are dropped, or will be: masquerading has no free source port towards it.",
		"Use a larger range of ports, fewer connections, or more addresses. Random ports do not help.", false},
	{"insert-failed", insertFailed{}, "warning if it grows or its cause exists, else info",
		"First packets were lost in a race, or without a free port: stalls of 1 s to 3 s, 5 s for DNS.",
		"Depends on the likely cause, which the evidence names.", false},
	{"conntrack-buckets-few", conntrackBucketsFew{}, "warning if chains are too long, else info",
		"Packets are slow, and then dropped: the hash chains are long.", "Raise `nf_conntrack_buckets`.", true},
	{"masquerade-not-random", masqueradeNotRandom{}, "warning where inserts failed and ports are free, else info",
		"New connections can lose their first packet: the SNAT race, by the owner of the rule.",
		"Use the same rule with `--random-fully`. The setting of the owner keeps it.", false},
	{"timeouts-long", timeoutsLong{}, "warning if a quarter of the table waits for finished flows, info from a twentieth on",
		"The table carries fewer connections in a second than it could.", "Use shorter timeouts; for pods by `securityContext`.", false},
	{"timeouts-differ", timeoutsDiffer{}, "info",
		"Timeouts of pods that track differ from the node's.", "Set the node's timeouts, by command and by `securityContext`.", false},
	{"helper-missing", helperMissing{}, "critical",
		"TFTP or FTP fails behind NAT rules, and no rule assigns the helper.",
		"Add the rules that assign it, for every port that leads there.", false},
	{"bridge-netfilter-off", bridgeNetfilter{}, "warning",
		"Replies between two pods of one bridge are not translated back.", "`net.bridge.bridge-nf-call-iptables=1`", false},
	{"bridge-netfilter-on", bridgeNetfilter{}, "info",
		"Frames that only cross a bridge are tracked, and no rule translates them.", "`net.bridge.bridge-nf-call-iptables=0`", false},
	{"iptables-both-variants", iptablesBothVariants{}, "warning",
		"Packets traverse two rule sets: legacy and nft both hold rules, and both decide.", "Remove the rules of one variant.", false},
	{"rules-many", rulesMany{}, "warning from 5,000 on, info from 1,000 on",
		"New connections start slowly: a first packet is compared with that many rules, one by one.", "Use a proxy that uses maps.", false},
	{"stale-udp-entries", staleUDPEntries{}, "warning",
		"UDP clients get no reply: their flows lead to an endpoint that no rule or Service has, or to which no route leads.",
		"Delete the entries.", true},
	{"tcp-not-liberal", tcpNotLiberal{}, "warning where a rule drops INVALID, else info",
		"Late segments are dropped, or not translated back.", "`nf_conntrack_tcp_be_liberal=1`", true},
	{"vxlan-checksum-offload", vxlanChecksumOffload{}, "warning",
		"Connections between nodes stall. A VXLAN device leaves checksums to the device below, and packets with wrong checksums arrive, or " +
			"the kernel is older than 5.7.",
		"`ethtool -K DEVICE tx-checksum-ip-generic off`", false},
	{"ipsec-with-ebpf", ipsecWithEBPF{}, "warning",
		"NodePort, LoadBalancer and externalIP connections to endpoints on other nodes are dropped where an IPsec policy selects them.",
		"Use `--proxy-mode nftables`, or policies that leave nodes and pods out.", false},
	{"tcx-program-in-front", tcxProgramInFront{}, "warning",
		"Services may not work on a device: another eBPF program sees packets before Spillway's, and hides packets that it does not pass on.",
		"Its program returns `TCX_NEXT`, or its owner attaches it behind.", false},
	{"mesh-with-socket-hooks", meshWithSocketHooks{}, "warning",
		"A mesh applies none of its rules for Services: socket hooks translate connections before the sidecar sees them.",
		"Annotate the Pods with `spillway.dev/socket-hooks: \"off\"`, or use `--socket-hooks host`.", false},
	{"nfs-with-socket-hooks", nfsWithSocketHooks{}, "warning, before Linux 6.6",
		"NFS mounts of the node hang after the server's Pod was replaced, if the server is a Service.",
		"Run Linux 6.6, or name a server that is no Service.", false},
	{"endpoint-unanswered", endpointUnanswered{},
		"critical, from 3 connections or SYNs of sockets on that have no answer, if the endpoint has answered no later one",
		"Connections to a Service fail: an endpoint does not answer. TCP with eBPF only.",
		"Look at the pod and its node. A readiness probe takes such a pod out of the Service.", false},
	{"endpoint-refuses", endpointRefuses{}, "critical, from 3 connections in a row on that an RST answers, if the endpoint has " +
		"accepted no later one",
		"Connections to a Service fail at once: an endpoint refuses them. TCP; eBPF only.",
		"Look at the process in the pod. A readiness probe takes such a pod out of the Service.", false},
	{"service-without-endpoints", serviceWithoutEndpoints{}, "critical, if a client was refused within the last minute",
		"Connections to a Service fail at once: it has no endpoint. eBPF only.",
		"Compare the selector of the Service with the labels of its Pods, and see why no Pod is ready.", false},
	{"source-range-refuses", sourceRangeRefuses{}, "info, if packets were refused within the last minute",
		"Clients outside `loadBalancerSourceRanges` of a Service are refused. eBPF only.",
		"Add the clients to the ranges, if they should be served.", false},
	{"service-snat-ports-exhausted", serviceSNATPortsExhausted{}, "critical, if packets were dropped within the last minute",
		"New connections to a Service fail: the node has no free source port towards an endpoint. eBPF only.",
		"Add endpoints, use `externalTrafficPolicy: Local`, or reuse connections.", false},
	{"policy-denies", policyDenies{}, "info, if packets were denied within the last minute",
		"Clients that a DoNotTrackPolicy with `deny: others` does not name are not served.",
		"Add the clients to the peers of the policy, if they should be served.", false},
	{"node-port-taken", nodePortTaken{}, "warning",
		"A program of the node is reached at loopback addresses alone: a Service, or a Pod's `hostPort`, has its port.",
		"Change the port of one of the two.", false},
	{"flow-table-full", flowTableFull{}, "critical from 95 % on, warning from 80 % on",
		"Idle connections to Services break, or will: the kernel evicts flows. eBPF only.",
		"Use a larger table, or a shorter timeout of established connections.", false},
	{"egress-ports-exhausted", egressPortsExhausted{},
		"critical from 95 % on, or if packets were dropped within the last minute; warning from 80 % on",
		"Pods' new connections to one destination outside fail, or will: the node has no free port towards it. eBPF with `--egress` only.",
		"Reuse connections, or use more addresses of the destination.", false},
	{"egress-bypasses-rules", egressBypassesRules{}, "warning",
		"Rules of this node that drop, queue or mark packets do not apply to pods' connections to the outside. eBPF with `--egress` only.",
		"Use a NetworkPolicy, `--egress on` with `nonMasqueradeCIDRs`, or `--bypass never`.", false},
	{"dsr-replies-missing", dsrRepliesMissing{}, "warning, if five clients in a row, or one of 20, got no direct reply",
		"New clients wait for a second, and then the endpoint does not see their address: it does not answer them directly. eBPF only.",
		"Repair the network or the endpoint's node, as the remedy says.", false},
	{"dsr-encapsulated", dsrEncapsulations{}, "info",
		"Packets with DSR are longer between the nodes: the network drops IP options. eBPF only.",
		"Have the network forward IP options, if throughput counts.", false},
	{"dsr-impossible", dsrEncapsulations{}, "warning",
		"Endpoints do not see clients' addresses: their node answers no probe. eBPF only.",
		"Repair the network or the endpoint's node, as the remedy says.", false},
	{"rp-filter-strict", rpFilterStrict{}, "warning",
		"DSR replies of Pods that a NetworkPolicy selects fail: the kernel drops clients' packets that come by a tunnel. eBPF only.",
		"`net.ipv4.conf.DEVICE.rp_filter=2`", false},
}

// NeedsAgent reports whether only a running agent finds it.
func (k Kind) NeedsAgent() bool { return slices.Contains(agentChecks, k.Check) }
