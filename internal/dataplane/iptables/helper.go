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

// A Service port may speak a protocol that opens a second port. Target CT assigns the
// kernel's helper for that protocol in table raw, before conntrack sees the first packet
// of a connection:
//
//	raw PREROUTING, OUTPUT ─> SPW-HELPERS   -d 10.96.0.69/32 --dport 69: CT --helper tftp
//	nat POSTROUTING ─ expected by a helper ─> SPW-EXPECTED
//
// Every packet of the node traverses SPW-HELPERS. If more than leafSize rules are needed, it leads
// to a tree of chains: see trie.
//
// Endpoints of this node are in SPW-HELPERS too: another node may have translated the
// connection already. This node's conntrack then has nothing to translate, and any
// program's rules apply to the expected connection. A CNI would masquerade a TFTP
// server's answer, which begins a connection, and the other node would not know it.
// SPW-EXPECTED keeps its source.
//
// A connection that the FTP helper expects is translated by the announcement, before any
// rule of table nat. A server could redirect a client's next connection to the node's
// SSH, or to another Service. Table mangle comes between. It drops the first packet of a
// connection to a port that the server may not announce (intent.NeverExpected). Conntrack
// then deletes the entry and the expectation, and the client's next attempt reaches the
// right destination.
//
//	mangle PREROUTING, OUTPUT ─ expected, TCP ─> SPW-ANNOUNCED   from or to endpoints of FTP ─> SPW-TAKEN
//	mangle PREROUTING ─ the node listens there ─> SPW-LISTENING  to such an endpoint ─> DROP
//
// All these chains, and the jumps to them, exist while a Service needs them. On a node
// without such Services the agent creates no tables raw and mangle. Adding or removing
// these chains, with their jumps, is a full sync.
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

// allTables are the tables that may hold rules of the agent.
var allTables = slices.Concat(tables, helpTables)

// kernelName returns the kernel's name of a helper. Tests replace it by a name that the
// kernel lacks.
var kernelName = intent.Helper.String

// helpers holds the state for a family's Services with a helper.
type helpers struct {
	helped  map[intent.PortID]*intent.ServicePort
	changed bool // since the last sync
	taken   bool // frontends of any port changed since
}

// fronts records that a port's frontends changed: no expectation of another Service may
// use them. Endpoints do not matter here.
func (h *helpers) fronts(old, now *intent.ServicePort) {
	same := func(a, b intent.Frontend) bool { return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port }
	if len(h.helped) > 0 && !(old != nil && now != nil && slices.EqualFunc(old.Frontends, now.Frontends, same)) {
		h.taken = true
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

// helpChains returns the chains that are needed, by table.
func (r *ruleset) helpChains() map[string][]chain {
	if len(r.helped) == 0 {
		return nil
	}
	assign, stay := dispatch{root: chainHelpers, addrDigits: addrDigits(r.family)}, chain{name: chainExpected}
	for _, p := range r.helped {
		r.helpPort(p, &assign, &stay)
	}
	out := map[string][]chain{tableMangle: r.expectationChains(), tableRaw: assign.chains()}
	slices.Sort(stay.rules)
	if stay.rules = slices.Compact(stay.rules); len(stay.rules) > 0 {
		out[tableNAT] = []chain{stay}
	}
	return out
}

func (r *ruleset) helpPort(p *intent.ServicePort, assign *dispatch, stay *chain) {
	to := func(addr netip.Addr, port uint16) {
		key := dispatchKey(&intent.Frontend{Kind: intent.ClusterIP, Addr: addr, Port: port}, p.ID.Protocol)
		assign.set(entry{key: key, rule: newRule(assign.match(key, "")).jump("CT --helper " + kernelName(p.Helper))})
	}
	for i := range p.Frontends {
		f := &p.Frontends[i]
		if f.Kind != intent.NodePort {
			to(f.Addr, f.Port)
			continue
		}
		for _, a := range r.nodePortAddrs {
			to(a, f.Port)
		}
	}
	for _, e := range p.Endpoints {
		if e.OnThisNode {
			to(e.Addr.Addr(), e.Addr.Port())
			stay.add(from(host(e.Addr.Addr())).jump("SNAT --to-source " + e.Addr.Addr().String()))
		}
	}
}

// chains returns the chains of a tree: none if it is empty, and the root alone if its rules fit.
func (d *dispatch) chains() (list []chain) {
	switch {
	case d.top == nil:
		return nil
	case d.top.leaf():
		return []chain{{d.root, d.rulesOf(d.top)}}
	}
	list = []chain{{d.root, []string{d.jump(d.top)}}}
	d.top.walk(func(n *trieNode) { list = append(list, chain{d.chain(n.prefix), d.rulesOf(n)}) })
	return list
}

// helpJumps returns the jumps to the chains that are wanted.
func (r *ruleset) helpJumps(table string) (out []jump) {
	for _, name := range helpChainNames {
		if _, wanted := r.want[table][name]; wanted {
			out = append(out, helperJumps(name)...)
		}
	}
	return out
}

// helperJumps returns the jumps from built-in chains to a chain of the helpers.
func helperJumps(name string) []jump {
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
		// A packet on lo comes from a process of the node, and is allowed.
		rule := newRule("! -i lo " + announcedMatch).add("-m addrtype --dst-type LOCAL").add("-m socket --nowildcard")
		return []jump{{tableMangle, "PREROUTING", comment(rule, "the node listens there").jump(name)}}
	}
	return nil
}

// announcedMatch matches connections that a helper expected, until they are answered.
const announcedMatch = "-p tcp -m conntrack --ctstate RELATED --ctstatus EXPECTED"

// expectationChains block connections that FTP announced to ports that do not belong to
// the announcer. Such a connection leads from a client to an endpoint (passive), or from
// an endpoint to a client whose address was masqueraded (active). The check of the node's
// sockets applies to passive connections only: a process of the node that is an active
// client listens for its data.
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

// recomputeHelpers updates the wanted chains, and returns the resulting differences. full
// reports that a chain comes or goes, and with it the jumps.
func (r *ruleset) recomputeHelpers() (diffs []difference, full bool) {
	if !r.changed {
		return r.recomputeTaken(), false
	}
	r.changed, r.taken = false, false
	chains := r.helpChains()
	for _, table := range slices.Concat([]string{tableNAT}, helpTables) {
		diff, wanted := difference{table: table}, map[string]bool{}
		for _, c := range chains[table] {
			wanted[c.name] = true
			before, was := r.want[table][c.name]
			if was && sumOf(c.rules) == before {
				continue
			}
			full = full || !was && slices.Contains(helpChainNames, c.name)
			r.wants(table, c.name, sumOf(c.rules))
			diff.fill = append(diff.fill, c)
		}
		for _, name := range slices.Sorted(maps.Keys(r.want[table])) {
			jumped := slices.Contains(helpChainNames, name)
			if wanted[name] || table == tableNAT && !jumped { // table nat has chains of others
				continue
			}
			r.rules[table] -= r.want[table][name].rules
			delete(r.want[table], name)
			diff.gone = append(diff.gone, name)
			full = full || jumped
		}
		if !diff.empty() {
			diffs = append(diffs, diff)
		}
	}
	return diffs, full
}

// recomputeTaken updates the one chain that depends on ports without a helper. The others may have
// a rule for each of a hundred thousand endpoints.
func (r *ruleset) recomputeTaken() []difference {
	before, was := r.want[tableMangle][chainTaken]
	if !r.taken || !was {
		return nil
	}
	r.taken = false
	c := r.takenChain()
	if sumOf(c.rules) == before {
		return nil
	}
	r.wants(tableMangle, c.name, sumOf(c.rules))
	return []difference{{table: tableMangle, fill: []chain{c}}}
}

// tables returns the family's tables that hold, or may hold, rules of the agent.
func (f *family) tables() []string {
	if f.raw || len(f.helped) > 0 {
		return allTables
	}
	return tables
}

// findRaw checks once whether an earlier run has left chains in the tables that only
// helpers need.
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

// missingHelper returns the reason why the kernel lacks a helper; nil if it has the
// helper.
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
	return fmt.Errorf("served without help, so that transfers fail: the kernel has no %s helper or no target CT (%s): load "+
		"nf_conntrack_%s, nf_nat_%s and xt_CT, or annotate the Service with %s=none if it is not %s",
		h, strings.TrimSpace(err.Error()), h, h, intent.HelperAnnotation, h)
}

// checkHelpers returns the ports without the helpers that the kernel lacks. failed names
// the ports that lose a helper.
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
		err, known := lacks[ask{f, p.Helper}]
		if !known {
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
