package iptables

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// Service ports of a protocol that opens a second port have the kernel's helper
// for it, which target CT gives to a connection in table raw, before conntrack has
// seen its first packet:
//
//	raw PREROUTING, OUTPUT ─> SPW-HELPERS   -d 10.96.0.69/32 --dport 69: CT --helper tftp
//	nat POSTROUTING ─ expected by a helper ─> SPW-EXPECTED
//
// Endpoints of this node are in SPW-HELPERS too: another node may have translated
// the connection already. This node's conntrack then has nothing to translate, and
// what it expects is open to anybody's rules: a CNI would masquerade a TFTP
// server's answer, which begins a connection, and the other node would not know
// it. SPW-EXPECTED says that its source stays.
//
// What a helper of FTP expects has its translation from the announcement, before
// any rule of table nat is asked: a server could have a client's next connection to the
// node's SSH, or to another Service. Table mangle comes between, and drops the first
// packet of a connection to a port that may not be announced (intent.NeverExpected).
// Conntrack forgets it and what was expected, and the client's next attempt gets to
// where it belongs.
//
//	mangle PREROUTING, OUTPUT ─ expected, TCP ─> SPW-ANNOUNCED   from or to endpoints of FTP ─> SPW-TAKEN
//	mangle PREROUTING ─ the node listens there ─> SPW-LISTENING  to such an endpoint ─> DROP
//
// All these chains, and the ways to them, are there while a Service needs them: a node
// without such Services has no tables raw and mangle from here. Chains that come or go,
// with their ways in, are a full sync.
const (
	tableRaw       = "raw"
	tableMangle    = "mangle"
	chainHelpers   = chainPrefix + "HELPERS"
	chainExpected  = chainPrefix + "EXPECTED"
	chainAnnounced = chainPrefix + "ANNOUNCED"
	chainListening = chainPrefix + "LISTENING"
	chainTaken     = chainPrefix + "TAKEN"
)

// helpTables are the tables that only a helper needs.
var helpTables = []string{tableRaw, tableMangle}

// helpChainNames are the chains that only a helper needs.
var helpChainNames = []string{chainHelpers, chainExpected, chainAnnounced, chainListening, chainTaken}

// allTables are those that may hold rules of ours.
var allTables = slices.Concat(tables, helpTables)

// kernelName is what the kernel calls a helper. Tests name one that it lacks.
var kernelName = intent.Helper.String

// helpers is what a family's Services with a helper need.
type helpers struct {
	helped  map[intent.PortID]*intent.ServicePort
	changed bool // since a sync wrote it
}

// fronts records that a port's frontends changed: no expectation of another Service may
// use them. Endpoints make no difference.
func (h *helpers) fronts(old, now *intent.ServicePort) {
	same := func(a, b intent.Frontend) bool { return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port }
	if len(h.helped) > 0 && !(old != nil && now != nil && slices.EqualFunc(old.Frontends, now.Frontends, same)) {
		h.changed = true
	}
}

func (h *helpers) forget(id intent.PortID) {
	if h.helped[id] != nil {
		delete(h.helped, id)
		h.changed = true
	}
}

func (h *helpers) remember(p *intent.ServicePort) {
	if p.Helper != intent.NoHelper {
		h.helped[p.ID] = p
		h.changed = true
	}
}

// helpChains writes out the chains that are needed, by table.
func (r *ruleset) helpChains() map[string][]chain {
	if len(r.helped) == 0 {
		return nil
	}
	assign, stay := chain{name: chainHelpers}, chain{name: chainExpected}
	for _, p := range r.helped {
		r.helpPort(p, &assign, &stay)
	}
	out := map[string][]chain{tableMangle: r.expectationChains()}
	for table, c := range map[string]*chain{tableRaw: &assign, tableNAT: &stay} {
		slices.Sort(c.rules)
		if c.rules = slices.Compact(c.rules); len(c.rules) > 0 {
			out[table] = []chain{*c}
		}
	}
	return out
}

func (r *ruleset) helpPort(p *intent.ServicePort, assign, stay *chain) {
	proto := protocolName(p.ID.Protocol)
	to := func(addr string, port uint16) {
		assign.add(newRule("-d "+addr+" -p "+proto+" -m "+proto).add("--dport", fmt.Sprint(port)).
			jump("CT --helper " + kernelName(p.Helper)))
	}
	for i := range p.Frontends {
		f := &p.Frontends[i]
		if f.Kind != intent.NodePort {
			to(host(f.Addr).String(), f.Port)
			continue
		}
		for _, a := range r.nodePortAddrs {
			to(host(a).String(), f.Port)
		}
	}
	for _, e := range p.Endpoints {
		if e.OnThisNode {
			to(host(e.Addr.Addr()).String(), e.Addr.Port())
			stay.add(from(host(e.Addr.Addr())).jump("SNAT --to-source " + e.Addr.Addr().String()))
		}
	}
}

// helpJumps are the ways into the chains that are wanted.
func (r *ruleset) helpJumps(table string) (out []jump) {
	for _, name := range helpChainNames {
		if _, wanted := r.want[table][name]; wanted {
			out = append(out, waysInto(name)...)
		}
	}
	return out
}

// waysInto are the rules in the kernel's chains that lead to one of a helper's.
func waysInto(name string) []jump {
	comment := func(r *rule, what string) *rule { return r.add(`-m comment --comment "spillway: ` + what + `"`) }
	switch name {
	case chainHelpers:
		rule := comment(newRule(""), "helpers").jump(name)
		return []jump{{tableRaw, "PREROUTING", rule}, {tableRaw, "OUTPUT", rule}}
	case chainExpected:
		rule := newRule("-m conntrack --ctstatus EXPECTED")
		return []jump{{tableNAT, "POSTROUTING", comment(rule, "expected by a helper").jump(name)}}
	case chainAnnounced:
		rule := comment(newRule(announcedMatch), "announced by FTP").jump(name)
		return []jump{{tableMangle, "PREROUTING", rule}, {tableMangle, "OUTPUT", rule}}
	case chainListening:
		// A packet by lo comes from a process of the node, and is allowed.
		rule := newRule("! -i lo " + announcedMatch).add("-m addrtype --dst-type LOCAL").add("-m socket --nowildcard")
		return []jump{{tableMangle, "PREROUTING", comment(rule, "the node listens there").jump(name)}}
	}
	return nil
}

// announcedMatch is of connections that a helper expected, until they are answered.
const announcedMatch = "-p tcp -m conntrack --ctstate RELATED --ctstatus EXPECTED"

// expectationChains keep connections that were announced by FTP away from ports that are
// not the announcer's: those from a client to an endpoint (passive), and those of an
// endpoint to a client whose address was masqueraded (active). A process of the node
// that is a client itself listens for its data, so the node's sockets say nothing of
// the latter.
func (r *ruleset) expectationChains() []chain {
	announced, listening := chain{name: chainAnnounced}, chain{name: chainListening}
	const led = "-m conntrack --ctstate DNAT"
	for _, p := range r.helped {
		if p.Helper != intent.FTP {
			continue
		}
		for _, e := range p.Endpoints {
			addr := e.Addr.Addr()
			announced.add(from(host(addr)).add(led).jump(chainTaken))
			announced.add(newRule(led).add("--ctreplsrc " + addr.String()).jump(chainTaken))
			listening.add(newRule(led).add("--ctreplsrc " + addr.String()).jump("DROP"))
		}
	}
	if len(announced.rules) == 0 {
		return nil
	}
	out := []chain{announced, r.takenChain()}
	if r.sockets {
		out = append(out, listening)
	}
	for i := range out {
		if out[i].name != chainTaken {
			slices.Sort(out[i].rules)
			out[i].rules = slices.Compact(out[i].rules)
		}
	}
	return out
}

// takenChain drops connections to ports that no expectation may use. For Services it names
// the NodePorts, and the ports of the addresses that serve FTP.
func (r *ruleset) takenChain() chain {
	c := chain{name: chainTaken}
	drop := func(match string, ports intent.PortRange) {
		text := fmt.Sprint(ports.First)
		if ports.Last != ports.First {
			text += fmt.Sprintf(":%d", ports.Last)
		}
		c.add(newRule(match).add("--dport " + text).jump("DROP"))
	}
	drop("-p tcp -m tcp", intent.NeverExpected)
	const local = "-p tcp -m addrtype --dst-type LOCAL -m tcp"
	for _, ports := range intent.KeptByNodes {
		drop(local, ports)
	}
	shared := map[netip.Addr][]uint16{}
	for _, p := range r.helped {
		for i := range p.Frontends {
			if f := &p.Frontends[i]; p.Helper == intent.FTP && f.Kind != intent.NodePort {
				shared[f.Addr] = nil
			}
		}
	}
	var nodePorts []uint16
	for _, p := range r.ports {
		for i := range p.Frontends {
			f := &p.Frontends[i]
			at, is := shared[f.Addr]
			switch {
			case p.ID.Protocol != model.TCP:
			case f.Kind == intent.NodePort:
				nodePorts = append(nodePorts, f.Port)
			case is:
				shared[f.Addr] = append(at, f.Port)
			}
		}
	}
	for _, ports := range rangesOfPorts(nodePorts) {
		drop(local, ports)
	}
	for _, addr := range slices.SortedFunc(maps.Keys(shared), netip.Addr.Compare) {
		for _, ports := range rangesOfPorts(shared[addr]) {
			drop("-d "+host(addr).String()+" -p tcp -m tcp", ports)
		}
	}
	return c
}

// rangesOfPorts joins ports that follow each other.
func rangesOfPorts(ports []uint16) (out []intent.PortRange) {
	slices.Sort(ports)
	for _, p := range slices.Compact(ports) {
		if n := len(out); n > 0 && p > 0 && out[n-1].Last == p-1 {
			out[n-1].Last = p
			continue
		}
		out = append(out, intent.PortRange{First: p, Last: p})
	}
	return out
}

// recomputeHelpers notes what the chains must hold, and returns what that changes in them.
// full says that one of them comes or goes, and with it the ways in.
func (r *ruleset) recomputeHelpers() (diffs []difference, full bool) {
	if !r.changed {
		return nil, false
	}
	r.changed = false
	chains := r.helpChains()
	for _, table := range slices.Concat([]string{tableNAT}, helpTables) {
		diff, wanted := difference{table: table}, map[string]bool{}
		for _, c := range chains[table] {
			wanted[c.name] = true
			before, was := r.want[table][c.name]
			if was && sumOf(c.rules) == before {
				continue
			}
			full = full || !was
			r.wants(table, c.name, sumOf(c.rules))
			diff.fill = append(diff.fill, c)
		}
		for _, name := range helpChainNames {
			if before, was := r.want[table][name]; was && !wanted[name] {
				r.rules[table] -= before.rules
				delete(r.want[table], name)
				full = true
			}
		}
		if !diff.empty() {
			diffs = append(diffs, diff)
		}
	}
	return diffs, full
}

// tables are those of the family that hold rules of ours, or may.
func (f *family) tables() []string {
	if f.raw || len(f.helped) > 0 {
		return allTables
	}
	return tables
}

// findRaw finds out, once, whether an earlier run has left something in the tables that
// only helpers need.
func (f *family) findRaw(ctx context.Context) error {
	if f.looked {
		return nil
	}
	dumps, err := f.programs.read(ctx, "", nil)
	if err != nil {
		return err
	}
	for _, d := range dumps {
		f.raw = f.raw || slices.Contains(helpTables, d.table) && (len(d.chains) > 0 || len(d.jumps) > 0)
	}
	f.looked = true
	return nil
}

// missingHelper says why the kernel has no such helper; nil if it has it.
func (f *family) missingHelper(ctx context.Context, h intent.Helper, protocol string) error {
	if h == intent.NoHelper || f.have[h] {
		return nil
	}
	kernel.LoadHelper(h.String())
	need := []feature{{h.String(), tableRaw, "-p " + protocol + " -j CT --helper " + kernelName(h), false}}
	if h == intent.FTP {
		need = append(need, feature{"announced", tableMangle, announcedMatch, false})
	}
	err := tryRules(ctx, f.programs, need)
	if err == nil && h == intent.FTP {
		f.sockets = tryRules(ctx, f.programs, []feature{{"socket", tableMangle, announcedMatch + " -m socket --nowildcard", false}}) == nil
	}
	if err == nil {
		f.have[h] = true
		return nil
	}
	return fmt.Errorf("served without help, so that transfers fail: the kernel has no %s helper or no target CT (%s): load nf_conntrack_%s, nf_nat_%s and xt_CT, or annotate the Service with %s=none if it is not %s",
		h, strings.TrimSpace(err.Error()), h, h, intent.HelperAnnotation, h)
}

// checkHelpers returns the ports as they can be served: without a helper that the
// kernel lacks. failed says of which that is true.
func (b *Backend) checkHelpers(ctx context.Context, ports []*intent.ServicePort, failed map[intent.PortID]error) []*intent.ServicePort {
	out := ports
	type ask struct {
		f *family
		h intent.Helper
	}
	lacks := map[ask]error{}
	for i, p := range ports {
		f := b.family(p.ID.Family)
		if p.Helper == intent.NoHelper || f == nil {
			continue
		}
		err, asked := lacks[ask{f, p.Helper}]
		if !asked {
			err = f.missingHelper(ctx, p.Helper, protocolName(p.ID.Protocol))
			lacks[ask{f, p.Helper}] = err
		}
		if err == nil {
			continue
		}
		if &out[0] == &ports[0] {
			out = slices.Clone(ports)
		}
		plain := *p
		plain.Helper = intent.NoHelper
		out[i], failed[p.ID] = &plain, err
	}
	return out
}
