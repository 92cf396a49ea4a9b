package ebpf

import (
	"slices"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
)

var _ dataplane.EgressReporter = (*Backend)(nil)

// EgressUse implements dataplane.EgressReporter.
func (b *Backend) EgressUse() (*dataplane.EgressUse, error) {
	use, err := b.flows.EgressUse()
	if use != nil {
		use.Refused = b.Verdicts()["drop_egress_ports"]
		for _, s := range b.attacher.Status() {
			if s.Role == attach.External && slices.Contains(s.Attached, "ingress") {
				use.Devices = append(use.Devices, s.Name)
			}
		}
	}
	return use, err
}
