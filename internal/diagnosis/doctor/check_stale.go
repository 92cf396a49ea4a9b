package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
)

// staleCheck looks for UDP entries that lead to an endpoint that is gone. What
// an agent knows of its Services is the business of conntrack/stale; here rules
// and routes must tell.
type staleCheck struct{}

func (staleCheck) Name() string  { return "stale UDP entries" }
func (staleCheck) About() string { return "entries to addresses that no rule or route has" }

// judged tells the entries that the check is about: in zone 0 (others are a
// CNI's own), of UDP, translated to another destination by a rule. What a helper
// expected, as a transfer by TFTP, is translated by what it belongs to.
func judged(e *conntrack.Entry) bool {
	return e.Protocol == unix.IPPROTO_UDP && e.Status&conntrack.DstNAT != 0 && e.Status&(conntrack.Dying|conntrack.Expected) == 0 &&
		e.Zone == 0 && e.Orig.Zone == 0 && e.Reply.Zone == 0
}

func (staleCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		if f, found := staleIn(&n.Namespaces[i]); found {
			out = append(out, f)
		}
	}
	return out
}

func staleIn(ns *Namespace) (Finding, bool) {
	f := Finding{
		ID: "stale-udp-entries", Severity: Warning, Namespace: ns.Namespace.String(),
		Title:   "UDP flows are kept on an endpoint that is gone",
		Packets: "A client that keeps its port (DNS resolvers, syslog, QUIC) is sent there for as long as it goes on asking, and gets no answer; new rules do not apply to it.",
		Mend:    "Delete the entries; the next packet makes a new one by the rules that hold now. spillway agent does so by itself when an endpoint goes.",
	}
	// Without all the rules, and where IPVS chooses, a missing rule says nothing.
	tell := ns.RulesWhole && !ns.IPVS && destNAT(ns)
	mentioned := ns.Rules.Addresses()
	addrs := make([]netip.Addr, 0, len(ns.Endpoints))
	for addr, p := range ns.Endpoints {
		if !p.Local && (p.Trouble != "" || tell && !mentioned.Mention(addr)) {
			addrs = append(addrs, addr)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	entries := 0
	for _, addr := range addrs {
		p := ns.Endpoints[addr]
		why := p.Trouble
		if why == "" {
			why = "no rule mentions it"
		}
		entries += p.Entries
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s: %d entries, %s (%s)", addr, p.Entries, why, &p.Example))
		f.Commands = append(f.Commands, fmt.Sprintf("%sconntrack -D -p udp --reply-src %s", ns.Namespace.EnterCommand(), addr))
	}
	f.Numbers = map[string]float64{"endpoints": float64(len(addrs)), "entries": float64(entries)}
	if !ns.RulesWhole {
		// What was not read may lead there, by a way that the route does not show.
		f.Evidence = append(f.Evidence, "not all rules of this namespace could be read, so that --fix leaves the entries alone")
		return f, len(addrs) > 0
	}
	return f.with(deleteEntries(ns.Namespace, addrs, entries)), len(addrs) > 0
}

// deleteEntries deletes the UDP entries that are translated to these addresses.
func deleteEntries(n conntrack.Namespace, addrs []netip.Addr, entries int) fix {
	return fix{
		does: fmt.Sprintf("delete %d stale UDP entries in %s", entries, n),
		do: func(ctx context.Context) (string, error) {
			deleted := 0
			err := n.Do(func(c *conntrack.Conn) error {
				var failed error
				err := c.Dump(ctx, conntrack.Filter{Protocol: unix.IPPROTO_UDP, Status: conntrack.DstNAT}, func(e *conntrack.Entry) bool {
					if !judged(e) || !slices.Contains(addrs, e.Reply.Src.Addr()) {
						return true
					}
					if err := c.Delete(e); err != nil {
						failed = err
						return true
					}
					deleted++
					return true
				})
				return errors.Join(err, failed)
			})
			return fmt.Sprintf("%d deleted", deleted), err
		},
	}
}
