package node

import (
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
)

// newWriter returns a Writer with all maps and no program. No address is a Service's.
func newWriter(t *testing.T, cfg objects.Config) *Writer {
	t.Helper()
	c, o := objectstest.Objects(t, cfg)
	return New(c, o, func(netip.Addr) bool { return false }, nil)
}

func addrList(list ...string) (out []netip.Addr) {
	for _, a := range list {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}
