package inspect

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// PinnedVerdicts returns the Verdicts of the instance pinned in a directory, even if
// its agent does not run. The error is os.ErrNotExist if there is none.
func PinnedVerdicts(bpffs string) (map[string]uint64, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(objects.MapsDir(bpffs), objects.TCMapVerdicts), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open counters in %s: %w", bpffs, err)
	}
	defer m.Close()
	spec, err := objects.LoadTC()
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects: %w", err)
	}
	names, err := objects.VerdictNames(spec)
	if err != nil {
		return nil, err
	}
	return objects.SumVerdicts(m, names), nil
}

// meanings says what the verdicts mean with which a packet or socket call is refused or
// dropped: effect first.
var meanings = map[string]string{
	"rejected_rst":          "answered with a TCP reset: the Service has no endpoint",
	"rejected_icmp":         "answered with ICMP port unreachable: the Service has no endpoint",
	"rejected_no_flow":      "answered with a TCP reset: no connection is known for the packet",
	"drop_policy_local":     "dropped: traffic policy Local, and no endpoint on this node",
	"drop_source_range":     "dropped: the client is not in loadBalancerSourceRanges",
	"drop_rejected_silent":  "dropped: the Service has no endpoint, and the packet must not be answered",
	"drop_no_backend":       "dropped: the endpoint was removed during the choice",
	"drop_snat_ports":       "dropped: no free source port towards the endpoint (SNAT ports exhausted)",
	"drop_no_snat_addr":     "dropped: the device has no address for SNAT",
	"drop_no_route":         "dropped: no route to the endpoint",
	"drop_flow_table":       "dropped: the flow could not be stored",
	"drop_rewrite":          "dropped: the kernel refused to rewrite the packet",
	"drop_helper_answers":   "dropped: too many ports of the server answer one request",
	"drop_helper_conflict":  "dropped: a server's answer from another port, to ports that another flow has by now",
	"drop_no_flow":          "dropped: no connection is known for the packet",
	"drop_xfrm":             "dropped: an IPsec policy selects the packet, and a redirect would bypass IPsec",
	"drop_source":           "dropped: the source address does not belong to the packet's device",
	"drop_missed_tail_call": "dropped: the program behind that of the device is gone, as if the pins in tailcalls/ had been removed",
	"drop_egress_ports":     "dropped: no free source port towards the destination outside",
	"drop_pod_replaced":     "dropped: the pod that asked is gone, and another has its address",
	"drop_dsr":              "dropped: it announces a connection for DSR, and no node with this cluster's key wrote that",
	"drop_syn_form":         "dropped: a SYN with IP options or in fragments, and the Service has a SYN filter",
	"drop_icmp_rate":        "not answered: the answer would exceed the rate of ICMP errors",
	"socket_refused":        "connect failed with ECONNREFUSED: the Service has no endpoint",
	"socket_timed_out":      "connect failed with ETIMEDOUT: traffic policy Local or a source range",
}

// Meaning says what a verdict means with which a packet or socket call is refused or dropped;
// "": it is not.
func Meaning(verdict string) string { return meanings[verdict] }

// Refuses reports whether a verdict refuses or drops.
func Refuses(verdict string) bool {
	return strings.HasPrefix(verdict, "drop_") || strings.HasPrefix(verdict, "rejected_") ||
		verdict == "socket_refused" || verdict == "socket_timed_out"
}
