package doctor

import (
	"fmt"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/kernel"
)

// vxlanChecksumOffload reports VXLAN devices that leave checksums to the device below,
// where the result is wrong.
type vxlanChecksumOffload struct{}

func (vxlanChecksumOffload) Name() string { return "VXLAN checksums" }
func (vxlanChecksumOffload) About() string {
	return "checksum offload, packets with a wrong checksum"
}

// fixedChecksums is the kernel in which a masqueraded VXLAN packet keeps its
// checksum of 0 ("netfilter: nat: never update the UDP checksum when it's 0").
var fixedChecksums = kernel.Version{Major: 5, Minor: 7}

func (vxlanChecksumOffload) Find(n *Node) []Finding {
	var where []string
	var tcp, udp uint64
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		if ns.ChecksumErrors["tcp"]+ns.ChecksumErrors["udp"] > 0 {
			where = append(where, ns.Namespace.String())
			tcp, udp = tcp+ns.ChecksumErrors["tcp"], udp+ns.ChecksumErrors["udp"]
		}
	}
	old := n.Kernel != (kernel.Version{}) && n.Kernel.Less(fixedChecksums)
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		for _, l := range ns.Links {
			if !l.TxChecksum || len(where) == 0 && !(old && translates(ns)) {
				continue
			}
			f := Finding{
				ID: "vxlan-checksum-offload", Severity: Warning, Namespace: ns.Namespace.String(), Object: nodeObject(l.Name),
				Title:    "connections between nodes may stall: checksums of packets through " + l.Name + " can be wrong",
				Evidence: []string{fmt.Sprintf("%s (%s) leaves checksums to the device below (tx-checksum-ip-generic)", l.Name, l.Kind)},
				Numbers:  map[string]float64{"tcp_checksum_errors": float64(tcp), "udp_checksum_errors": float64(udp)},
				Packets: "Connections between nodes stall or take 63 s to start, while ping works: the receiver silently discards packets with a " +
					"wrong checksum.",
				Remedy: "Let the kernel compute the checksums. This costs CPU time: compare the throughput, and check that the errors stop. To " +
					"keep it: a .link file with TransmitChecksumOffload=no; Calico: featureDetectOverride ChecksumOffloadBroken=true.",
				Commands: []string{fmt.Sprintf("%sethtool -K %s tx-checksum-ip-generic off", ns.Namespace.EnterCommand(), escape.Shell(l.Name))},
			}
			if len(where) > 0 {
				f.Evidence = append(f.Evidence, fmt.Sprintf("received with a wrong checksum: %d of TCP, %d of UDP, in %s", tcp, udp, names(where)))
			}
			if old {
				f.Evidence = append(f.Evidence, fmt.Sprintf("Linux %s is older than 5.7, the first that masquerades VXLAN packets correctly", n.Kernel))
			}
			out = append(out, f)
		}
	}
	return out
}
