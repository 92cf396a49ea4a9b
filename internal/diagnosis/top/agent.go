package top

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/node/conntrack"
)

// Agent is a node's agent. It knows names, and flows of which conntrack has no entries.
type Agent interface {
	// Flows returns flows of the agent's own flow table, and whether there are more. With egress, they are
	// those of egress alone, but an agent of an earlier version returns others too.
	Flows(_ context.Context, egress bool) (flows []Flow, more bool, err error)
	// WithoutEgress returns why Flows has no flow of egress, in one line; nil: pods have none.
	WithoutEgress(context.Context) error
	// Owners returns the owners of addresses, in their order, with those that are known even
	// if it returns an error.
	Owners(context.Context, []Address) ([]Owner, error)
}

// Flow is a flow of the agent's own flow table.
type Flow struct {
	Protocol                  string
	Client, Service, Endpoint netip.AddrPort
	// Egress says that it is a pod's own connection to the outside, at Endpoint. Service is invalid.
	Egress bool
	Pod    string // of Client, as namespace/name; "": unknown
}

// Address is what a row of a view counts. Sources have neither protocol nor port.
type Address struct {
	Protocol string // as conntrack.ProtocolName
	AddrPort netip.AddrPort
}

func (a Address) String() string {
	if a.Protocol == "" {
		return a.AddrPort.Addr().String()
	}
	if a.AddrPort.Port() == 0 { // the destination of a ping
		return a.Protocol + " " + a.AddrPort.Addr().String()
	}
	return a.Protocol + " " + a.AddrPort.String()
}

// Owner is what the agent knows about an Address. The keys are an interface for programs.
type Owner struct {
	// Service is the Service port that is served there, as namespace/name:port.
	Service string `json:"service,omitempty"`
	// EndpointOf are the Service ports that have it as an endpoint.
	EndpointOf []string `json:"endpointOf,omitempty"`
	Pod        string   `json:"pod,omitempty"` // namespace/name
}

// label is such as "shop/web-1 of shop/web:http"; "" if nothing is known.
func (o *Owner) label() string {
	if o.Service != "" {
		return o.Service
	}
	label := o.Pod
	if len(o.EndpointOf) > 0 {
		label = strings.TrimSpace(label + " of " + strings.Join(o.EndpointOf, ", "))
	}
	return label
}

// named is how many rows of a Sample get names from the agent: those with the most entries.
const named = 1024

// countFlows adds the agent's own flows. They are in the agent's network namespace, which is
// the caller's own as a rule.
func (c *Collector) countFlows(ctx context.Context, s *Sample, reports []conntrack.Report, only uint64, counts map[Address]int) {
	own := only == 0 || slices.ContainsFunc(reports, func(r conntrack.Report) bool { return r.Namespace.Own && r.Namespace.Inode == only })
	if c.Agent == nil || !own {
		return
	}
	flows, _ := c.flows(ctx, s, false)
	for _, f := range flows {
		a := Address{f.Protocol, f.Service}
		switch s.View {
		case Sources:
			a = Address{AddrPort: netip.AddrPortFrom(f.Client.Addr(), 0)}
		case Endpoints:
			a.AddrPort = f.Endpoint
			if f.Egress { // no endpoint of a Service
				continue
			}
		}
		if a.AddrPort.IsValid() {
			counts[a]++
		}
	}
}

// flows returns the agent's own flows, and whether they could be read.
func (c *Collector) flows(ctx context.Context, s *Sample, egress bool) ([]Flow, bool) {
	flows, more, err := c.Agent.Flows(ctx, egress)
	if err != nil {
		s.Problems = append(s.Problems, err.Error())
		return nil, false
	}
	if more {
		s.Problems = append(s.Problems, "Spillway's flow table has more flows than are counted here")
	}
	return flows, true
}

// egress counts the flows of egress by pod and destination.
func (c *Collector) egress(ctx context.Context, s *Sample) []Row {
	if c.Agent == nil {
		s.Problems = append(s.Problems, "connections of egress are not listed: they need an agent")
		return nil
	}
	flows, read := c.flows(ctx, s, true)
	var rows []Row
	index := map[string]int{} // in rows, by Row.key
	for _, f := range flows {
		if !f.Egress {
			continue
		}
		r := Row{Address: Address{f.Protocol, f.Endpoint}, Client: f.Client.Addr(), Owner: Owner{Pod: f.Pod}}
		i, known := index[r.key()]
		if !known {
			i = len(rows)
			r.Name = r.pod() + " " + r.Address.String()
			rows, index[r.key()] = append(rows, r), i
		}
		rows[i].Entries++
	}
	if read && len(rows) == 0 {
		s.problem(c.Agent.WithoutEgress(ctx))
	}
	return rows
}

// owners returns the owners of the addresses with the most entries.
func (c *Collector) owners(ctx context.Context, s *Sample, counts map[Address]int) map[Address]Owner {
	if c.Agent == nil {
		return nil
	}
	addrs := make([]Address, 0, len(counts))
	for a := range counts {
		addrs = append(addrs, a)
	}
	slices.SortFunc(addrs, func(a, b Address) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), a.AddrPort.Compare(b.AddrPort), cmp.Compare(a.Protocol, b.Protocol))
	})
	addrs = addrs[:min(named, len(addrs))]
	list, err := c.Agent.Owners(ctx, addrs)
	if err != nil && !slices.Contains(s.Problems, err.Error()) {
		s.Problems = append(s.Problems, err.Error())
	}
	owners := make(map[Address]Owner, len(list))
	for i := range list {
		owners[addrs[i]] = list[i]
	}
	return owners
}

// nameOf adds to an address what the agent knows about it, or else the pod of this machine that
// has it.
func nameOf(a Address, owner Owner, pods map[netip.Addr]string) string {
	if label := owner.label(); label != "" {
		return a.String() + " " + label
	}
	if pod := pods[a.AddrPort.Addr()]; pod != "" {
		return a.String() + " " + pod
	}
	return a.String()
}
