package trace

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/iptablessave"
	"spillway.dev/spillway/internal/node/kernel"
)

// withoutInstance traces a connection on a node without the eBPF dataplane: netfilter's
// rules translate it.
func (t *tracer) withoutInstance(ctx context.Context) error {
	var err error
	if t.ns, err = kernel.OpenNetns("/proc/thread-self/ns/net"); err != nil {
		return err
	}
	t.findNetfilterClient()
	if t.SourcePort == 0 {
		t.SourcePort = freePort(t.canBind)
	}
	t.ClientPort = t.SourcePort
	t.add(Step{Name: stepEntry, Lookup: "addresses of this node and its pods",
		Found: fmt.Sprintf("%s is a client of kind %s", t.From.Addr, t.client.kind), Follows: "no eBPF dataplane is pinned: netfilter decides"})
	if err := t.netfilterSteps(ctx); err != nil {
		return err
	}
	return t.probe(ctx)
}

// findNetfilterClient finds the client without the maps of the eBPF dataplane.
func (t *tracer) findNetfilterClient() {
	t.client.kind = outsideClient
	if ownAddr(t.From.Addr) {
		t.client.kind = nodeClient
	} else if pod := t.neighborNamespace(); pod != nil {
		t.client.kind, t.client.ns = podClient, pod
	}
	t.Client = string(t.client.kind)
}

// neighborNamespace returns the namespace with the client's address to which a device of this
// one leads; nil if there is none.
func (t *tracer) neighborNamespace() *conntrack.Namespace {
	list, _ := conntrack.Namespaces() // a namespace that cannot be read counts as missing
	pod, err := drops.FindPod(t.From.Addr.String(), list)
	if err != nil {
		return nil
	}
	peers := slices.Collect(maps.Values(t.peerIDs()))
	for i := range pod.Namespaces {
		if slices.Contains(peers, t.netnsID(pod.Namespaces[i])) {
			return &pod.Namespaces[i]
		}
	}
	return nil
}

// ownAddr reports whether an address is of the calling thread's network namespace.
func ownAddr(a netip.Addr) bool {
	addrs, _ := net.InterfaceAddrs()
	return slices.ContainsFunc(addrs, func(have net.Addr) bool {
		p, err := netip.ParsePrefix(have.String())
		return err == nil && p.Addr().Unmap() == a
	})
}

// netfilterSteps shows the entries and rules of netfilter for the address, and conntrack's
// entries.
func (t *tracer) netfilterSteps(ctx context.Context) error {
	own := false
	_ = t.inside(func() error { own = ownAddr(t.to().Addr()); return nil })
	served, err := nftables.FindServing(ctx, t.inside, "", t.Protocol, t.to(), own)
	if err != nil {
		t.note("The nftables dataplane's table is not read: %v", err)
	}
	if served != nil {
		t.Dataplane = "nftables"
		t.nftSteps(served)
		return t.trackedStep()
	}
	rules := t.iptablesRules()
	if len(rules) > 0 {
		t.Dataplane = "iptables"
		t.add(Step{Name: stepOther, Lookup: "iptables-save -t nat", Found: strings.Join(rules, "; "),
			Follows: "iptables' rules translate", State: Decided})
		t.Decision = "rules of iptables translate: the probe shows to which endpoint"
		return t.trackedStep()
	}
	if t.Dataplane == "" {
		t.Dataplane = "none"
	}
	t.add(Step{Name: stepOther, Lookup: "nft table spillway, iptables-save -t nat", Found: "nothing names this address and port",
		Follows: "no Service proxy of this node serves it", State: Doubt})
	if t.Decision == "" {
		t.Decision = "no Service proxy of this node serves the address and port"
	}
	return t.trackedStep()
}

// nftSteps shows the elements of the nftables dataplane.
func (t *tracer) nftSteps(s *nftables.Serving) {
	t.add(Step{
		Name: stepFrontend, Lookup: fmt.Sprintf("table inet spillway[%s/%s]", t.to(), t.ProtocolName),
		Found:   fmt.Sprintf("%s, a %s; in the sets %s", s.Service, s.Kind, strings.Join(s.Sets, ", ")),
		Follows: "nftables' rules decide by these sets",
	})
	refuses := slices.ContainsFunc(s.Sets, func(name string) bool { return strings.Contains(name, "drop") })
	step := Step{Name: stepEndpoint, Lookup: "maps of the frontend", State: Decided}
	switch {
	case len(s.Endpoints) > 0:
		var list []string
		for _, e := range s.Endpoints {
			list = append(list, e.String())
		}
		step.Found = fmt.Sprintf("%d: %s", len(list), shortList(list))
		step.Follows = "a random one of them, or that of the session affinity"
		t.Decision = "nftables translates to one of " + step.Found
		if len(list) == 1 {
			t.Endpoint, t.Decision = list[0], "nftables translates to "+list[0]
		}
	case refuses:
		step.Found, step.Follows, step.State = "none on this node", "dropped: traffic policy Local", Refused
		t.Refused, t.Decision = true, "dropped: traffic policy Local, and no endpoint on this node"
	default:
		step.Found, step.Follows, step.State = "no endpoint", "refused: the Service has no endpoint", Refused
		t.Refused, t.Decision = true, "refused: the Service has no endpoint"
	}
	t.add(step)
}

// trackedStep shows conntrack's entries for the address.
func (t *tracer) trackedStep() error {
	entries, err := t.conntrackEntries(t.to())
	s := Step{Name: stepNetfilter, Lookup: fmt.Sprintf("conntrack, to %s/%s", t.to(), t.ProtocolName),
		Found: fmt.Sprintf("%d entries", len(entries))}
	if err != nil {
		s.Found = err.Error()
	}
	for i := range entries {
		if entries[i].Orig.Src == t.from() {
			s.Found += fmt.Sprintf("; one of this source, to %s, %v left: its packets follow it", entries[i].Reply.Src, entries[i].Timeout)
			s.State = Doubt
		}
	}
	t.add(s)
	return nil
}

// followTracked replaces the address that the probe reached by that to which netfilter has
// translated it.
func (t *tracer) followTracked() {
	entries, err := t.conntrackEntries(t.to())
	if err != nil {
		return
	}
	for i := range entries {
		if entries[i].Orig.Src == t.from() && entries[i].Status&conntrack.DstNAT != 0 {
			t.remote = entries[i].Reply.Src
			t.Probe.Remote = t.remote.String()
		}
	}
}

// mostRules bounds the rules that are shown.
const mostRules = 8

// iptablesRules lists the rules of table nat that name the address and port, and those of
// the chains to which they jump.
func (t *tracer) iptablesRules() (out []string) {
	family := ""
	if t.To.Addr.Is6() {
		family = "6"
	}
	for _, variant := range []string{"nft", "legacy"} {
		program, err := exec.LookPath("ip" + family + "tables-" + variant + "-save")
		if err != nil {
			continue
		}
		var text []byte
		_ = t.inside(func() error {
			text, err = exec.Command(program, "-t", "nat").Output()
			return err
		})
		out = append(out, rulesFor(text, t.to(), t.ProtocolName)...)
	}
	return out[:min(len(out), mostRules)]
}

// rulesFor finds the rules for an address and port, and follows their jumps once.
func rulesFor(text []byte, to netip.AddrPort, protocol string) (out []string) {
	chains := map[string][]string{}
	var first, jumps []string
	for line, err := range iptablessave.Lines(bytes.NewReader(text)) {
		if err != nil {
			break
		}
		if line.Kind != iptablessave.Rule {
			continue
		}
		chains[line.Chain] = append(chains[line.Chain], line.Rule)
		words := strings.Fields(line.Rule)
		after := func(word string) string {
			if i := slices.Index(words, word); i >= 0 && i+1 < len(words) {
				return words[i+1]
			}
			return ""
		}
		addr, _, _ := strings.Cut(after("-d"), "/")
		if after("--dport") == fmt.Sprint(to.Port()) && after("-p") == protocol && (addr == to.Addr().String() || addr == "") {
			first = append(first, "-A "+line.Chain+" "+line.Rule)
			jumps = append(jumps, after("-j"), after("-g"))
		}
	}
	out = first
	for _, chain := range jumps {
		for _, rule := range chains[chain] {
			out = append(out, "-A "+chain+" "+rule)
		}
	}
	return out
}
