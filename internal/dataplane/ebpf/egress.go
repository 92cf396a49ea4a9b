package ebpf

import "spillway.dev/spillway/internal/dataplane"

var _ dataplane.EgressReporter = (*Backend)(nil)

// EgressUse implements dataplane.EgressReporter.
func (b *Backend) EgressUse() (*dataplane.EgressUse, error) {
	use, err := b.flows.EgressUse()
	if use != nil {
		use.Refused = b.Verdicts()["drop_egress_ports"]
	}
	return use, err
}
