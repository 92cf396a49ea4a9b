package node

import (
	"errors"
	"slices"

	"spillway.dev/spillway/internal/node/kernel"
)

// nodePortRange is the API server's default --service-node-port-range. Its ports must
// not be source ports: a reply to such a port would look like a request.
var nodePortRange = kernel.PortRange{First: 30000, Last: 32767}

// portLists has the ports that may replace a client's port: both lists in sequence, and
// their lengths.
type portLists struct {
	ports         []uint16
	snat, network uint32
}

// networkPortOf8 selects every eighth port for flows that keep the address of another
// node or of its pod. All nodes agree on these ports, whatever else their lists lack.
// So the ports that a node uses for itself and its pods never equal those that another
// node uses for them.
const networkPortOf8 = 6

func listPorts() (l portLists, err error) {
	all, err := snatPortList()
	if err != nil {
		return l, err
	}
	var network []uint16
	for _, p := range all {
		if p%8 == networkPortOf8 {
			network = append(network, p)
		} else {
			l.ports = append(l.ports, p)
		}
	}
	l.snat, l.network = uint32(len(l.ports)), uint32(len(network))
	l.ports = append(l.ports, network...)
	return l, nil
}

// snatPortList returns every port that may replace a client's port. It leaves out the
// ephemeral ports of the node's sockets and the ports that the administrator has
// reserved.
func snatPortList() ([]uint16, error) {
	local, err := kernel.LocalPortRange()
	if err != nil {
		return nil, err
	}
	reserved, err := kernel.LocalReservedPorts()
	if err != nil {
		return nil, err
	}
	banned := append([]kernel.PortRange{local, nodePortRange}, reserved...)
	var ports []uint16
	for p := 1024; p <= 65535; p++ {
		if !slices.ContainsFunc(banned, func(r kernel.PortRange) bool {
			return uint16(p) >= r.First && uint16(p) <= r.Last
		}) {
			ports = append(ports, uint16(p))
		}
	}
	if len(ports) == 0 {
		return nil, errors.New("net.ipv4.ip_local_port_range and ip_local_reserved_ports leave no port for SNAT: make one of them smaller")
	}
	return ports, nil
}
