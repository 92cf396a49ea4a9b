package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/page"
)

// staleUDPEntries reports UDP entries to an endpoint that no longer exists. It derives this
// from rules and routes, and from the Services of a running agent. Package conntrack/stale
// deletes such entries as an agent's Services change.
type staleUDPEntries struct{}

func (staleUDPEntries) Name() string  { return "stale UDP entries" }
func (staleUDPEntries) About() string { return "entries to addresses without a rule or a route" }

// translatedUDP reports whether the check covers an entry: in zone 0 (CNIs own other
// zones), of UDP, translated to another destination by a rule. An expected connection,
// such as a TFTP transfer, is translated by its master connection and not covered.
func translatedUDP(e *conntrack.Entry) bool {
	return e.Protocol == unix.IPPROTO_UDP && e.Status&conntrack.DstNAT != 0 && e.Status&(conntrack.Dying|conntrack.Expected) == 0 &&
		e.Zone == 0 && e.Orig.Zone == 0 && e.Reply.Zone == 0
}

func (staleUDPEntries) Find(n *Node) []Finding {
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
		Title: "UDP clients still talk to an endpoint that no longer exists: their conntrack entries lead to it",
		Packets: "A client that keeps its source port (DNS resolvers, syslog, QUIC) gets no reply, or one from the old endpoint, while it " +
			"keeps sending: the kernel follows the entry and ignores new rules.",
		Remedy: "Delete the entries; the next packet creates one from the current rules. spillway agent does this when an endpoint is removed.",
	}
	// A missing rule proves nothing if not all rules were read, or if IPVS chooses.
	allRules := ns.AllRulesRead && !ns.IPVS && destNAT(ns)
	mentioned := ns.Rules.Addresses()
	addrs := make([]netip.AddrPort, 0, len(ns.Endpoints))
	for addr, p := range ns.Endpoints {
		if !p.Local && (p.RemovedFrom+p.Unreachable != "" || allRules && !mentioned.Mention(addr.Addr())) {
			addrs = append(addrs, addr)
		}
	}
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	entries := 0
	for _, addr := range addrs {
		p := ns.Endpoints[addr]
		why := "no rule translates to it"
		switch {
		case p.RemovedFrom != "":
			why = "Service " + p.RemovedFrom + " does not have it"
		case p.Unreachable != "":
			why = p.Unreachable
		}
		entries += p.Entries
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s: %s, %s (%s)", addr, page.Counted(p.Entries, "entry"), why, &p.Example))
		f.Commands = append(f.Commands, fmt.Sprintf("%sconntrack -D -p udp --reply-src %s --reply-port-src %d", ns.Namespace.EnterCommand(),
			addr.Addr(), addr.Port()))
	}
	f.Numbers = map[string]float64{"endpoints": float64(len(addrs)), "entries": float64(entries)}
	if !ns.AllRulesRead {
		// A rule that was not read may lead to the endpoint by another route.
		f.Evidence = append(f.Evidence, "not all rules of this namespace could be read, so --fix does not delete the entries")
		return f, len(addrs) > 0
	}
	return f.with(deleteEntries(ns.Namespace, addrs, entries)), len(addrs) > 0
}

// deleteEntries deletes the UDP entries that are translated to these endpoints.
func deleteEntries(n conntrack.Namespace, addrs []netip.AddrPort, entries int) fix {
	return fix{
		does: fmt.Sprintf("delete %s in %s", page.Counted(entries, "stale UDP entry"), n),
		do: func(ctx context.Context) (string, error) {
			deleted := 0
			err := n.Do(func(c *conntrack.Conn) error {
				var failed error
				err := c.Dump(ctx, conntrack.Filter{Protocol: unix.IPPROTO_UDP, Status: conntrack.DstNAT}, func(e *conntrack.Entry) bool {
					if !translatedUDP(e) || !slices.Contains(addrs, e.Reply.Src) {
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
