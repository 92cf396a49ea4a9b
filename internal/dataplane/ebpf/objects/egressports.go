package objects

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// egressPorts is the map egress_ports. The programs write it too, so each port is a byte of its own.
type egressPorts struct{ memory *ebpf.Memory }

// openEgressPorts opens the map; layout 2 has none.
func openEgressPorts(m map[string]*ebpf.Map) (egressPorts, error) {
	if m[TCMapEgressPorts] == nil {
		return egressPorts{}, nil
	}
	memory, err := m[TCMapEgressPorts].Memory()
	if err != nil {
		return egressPorts{}, fmt.Errorf("map %s into memory: %w", TCMapEgressPorts, err)
	}
	return egressPorts{memory}, nil
}

// mark lets the answers of a flow of egress pass, by its entry for packets of the pod.
func (p egressPorts) mark(f *TCFlow) error {
	if p.memory == nil || TCFlowFlags(f.Flags)&TCFlowFlagsFLOW_REPLY != 0 {
		return nil
	}
	_, err := p.memory.WriteAt([]byte{1}, int64(ToPort(f.Sport)))
	return err
}
