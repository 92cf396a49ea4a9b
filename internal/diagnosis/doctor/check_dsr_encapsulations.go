package doctor

import (
	"fmt"
	"net/netip"

	"spillway.dev/spillway/internal/page"
)

// dsrEncapsulations reports endpoints on other nodes whose node learns about the Service in another way
// than by an IP option, or in none.
type dsrEncapsulations struct{}

func (dsrEncapsulations) Name() string { return "DSR encapsulations" }
func (dsrEncapsulations) About() string {
	return "IP options between the nodes"
}

func (dsrEncapsulations) Find(n *Node) (found []Finding) {
	if n.Traffic == nil {
		return nil
	}
	d := &n.Traffic.DSR
	const network = "Have the network between the nodes forward packets with IP options (IPv4 type 158, IPv6 destination options of type 30). "
	if e := &d.Encapsulated; e.Count > 0 {
		found = append(found, Finding{
			ID: "dsr-encapsulated", Severity: Info,
			Title:    fmt.Sprintf("the network drops IP options to %s of %d", page.Counted(e.Count, "endpoint"), d.Probed),
			Evidence: append(e.evidence(), fmt.Sprintf("the longest packet that arrives has %d bytes", d.MTU)),
			Numbers:  map[string]float64{"endpoints": float64(e.Count), "probed_endpoints": float64(d.Probed), "mtu": float64(d.MTU)},
			Packets: "All packets of DSR connections to these endpoints travel within datagrams of UDP (--dsr-port). " +
				"They are 48 bytes longer (IPv4) or 80 (IPv6): a client that sends longer ones than fit gets an ICMP error with the MTU. XDP does " +
				"not forward them.",
			Remedy: network + "Nothing is lost without it.",
		})
	}
	if e := &d.Unreached; e.Count > 0 {
		found = append(found, Finding{
			ID: "dsr-impossible", Severity: Warning,
			Title:    fmt.Sprintf("%s of %d cannot answer clients directly", page.Counted(e.Count, "endpoint"), d.Probed),
			Evidence: e.evidence(),
			Numbers:  map[string]float64{"endpoints": float64(e.Count), "probed_endpoints": float64(d.Probed)},
			Packets: "The endpoint's node answers no probe of this node. So new connections get this node's address: clients are served, and " +
				"the endpoint does not see their addresses.",
			Remedy: "Look at the endpoint's node: it needs an agent with --proxy-mode ebpf, and --dsr-key-file and --dsr-port as here " +
				"(spillway_ebpf_drops_total{reason=\"dsr\"} grows there, if the secret differs). " +
				network + "Or have it forward UDP to --dsr-port of pods.",
		})
	}
	return found
}

// shownAddresses is how many addresses evidence has.
const shownAddresses = 5

// SomeAddresses are addresses, of which evidence names the first.
type SomeAddresses struct {
	Count int
	First []netip.Addr
}

// Add adds an address.
func (s *SomeAddresses) Add(a netip.Addr) {
	if s.Count++; len(s.First) < shownAddresses {
		s.First = append(s.First, a)
	}
}

func (s *SomeAddresses) evidence() (list []string) {
	for _, a := range s.First {
		list = append(list, a.String())
	}
	if more := s.Count - len(s.First); more > 0 {
		list = append(list, "and "+page.Counted(more, "more endpoint"))
	}
	return list
}
