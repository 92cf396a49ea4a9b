package inspect

import (
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// DSR reports whether endpoints of a Service on other nodes answer TCP clients directly.
func (v *View) DSR(service uint32) bool {
	s, _ := lookup[uint32, objects.TCService](v, objects.TCMapServices, service)
	return v.hasDSRKeys() && objects.TCServiceFlags(s.Flags)&objects.TCServiceFlagsSERVICE_DSR != 0
}

// hasDSRKeys reports whether the instance has keys for DSR replies.
func (v *View) hasDSRKeys() bool {
	return v.maps[objects.TCMapDsrPaths].MaxEntries() == objects.MaxDSRPaths
}

// DSRPath is dataplane.DSRPath, for readers of a View.
type DSRPath = dataplane.DSRPath

// DSRPath reads what the programs know about the replies of an endpoint on another node; nil
// if they know nothing.
func (v *View) DSRPath(backend uint32) *DSRPath {
	p, found := lookup[uint32, objects.TCDsrPath](v, objects.TCMapDsrPaths, backend)
	if !found {
		return nil
	}
	of, _ := lookup[uint32, objects.TCBackend](v, objects.TCMapBackends, backend)
	path := describePath(&p, of, objects.BootSeconds())
	return &path
}

// EncapsulationGUE and EncapsulationNone are those of dataplane, for readers of a View.
const (
	EncapsulationGUE  = dataplane.EncapsulationGUE
	EncapsulationNone = dataplane.EncapsulationNone
)

// DSREncapsulation reads how packets tell the node of an endpoint about the Service: one of
// dataplane.Encapsulations.
func (v *View) DSREncapsulation(endpoint netip.Addr) string {
	c, found := lookup[objects.TCAddrKey, objects.TCDsrEncapsulation](v, objects.TCMapDsrEncapsulations, objects.AddrKey(endpoint))
	if !found {
		return dataplane.EncapsulationUnknown
	}
	return objects.EncapsulationName(c)
}

// DSRRetry is the time after the last repeated SYN for which a path is not trusted.
const DSRRetry = time.Duration(objects.TCDsrPathLimitDSR_RETRY_SECONDS) * time.Second
