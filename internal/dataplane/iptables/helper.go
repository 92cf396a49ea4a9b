package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/intent"
	"spillway.dev/spillway/internal/kernel"
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
// Both chains, and the ways to them, are there while a Service needs them: a node
// without such Services has no table raw from here. There are few of them, so a
// change of theirs is a full sync.
const (
	tableRaw      = "raw"
	chainHelpers  = chainPrefix + "HELPERS"
	chainExpected = chainPrefix + "EXPECTED"
)

// kernelName is what the kernel calls a helper. Tests name one that it lacks.
var kernelName = intent.Helper.String

// help is what a family's Services with a helper need.
type help struct {
	helped  map[intent.PortID]*intent.ServicePort
	changed bool // since somebody took it in
}

func (h *help) forget(id intent.PortID) {
	if h.helped[id] != nil {
		delete(h.helped, id)
		h.changed = true
	}
}

func (h *help) remember(p *intent.ServicePort) {
	if p.Helper != intent.NoHelper {
		h.helped[p.ID] = p
		h.changed = true
	}
}

// helpChains writes out the chains that are needed, by table.
func (r *ruleset) helpChains() map[string]chain {
	if len(r.helped) == 0 {
		return nil
	}
	assign, stay := chain{name: chainHelpers}, chain{name: chainExpected}
	for _, p := range r.helped {
		r.helpPort(p, &assign, &stay)
	}
	out := map[string]chain{}
	for table, c := range map[string]*chain{tableRaw: &assign, tableNAT: &stay} {
		slices.Sort(c.rules)
		if c.rules = slices.Compact(c.rules); len(c.rules) > 0 {
			out[table] = *c
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
		if e.Here {
			to(host(e.Addr.Addr()).String(), e.Addr.Port())
			stay.add(from(host(e.Addr.Addr())).jump("SNAT --to-source " + e.Addr.Addr().String()))
		}
	}
}

// helpJumps are the ways into the chains that are there.
func (r *ruleset) helpJumps(table string) []jump {
	c, needed := r.helpChains()[table]
	switch {
	case !needed:
		return nil
	case table == tableRaw:
		rule := newRule(`-m comment --comment "spillway: helpers"`).jump(c.name)
		return []jump{{tableRaw, "PREROUTING", rule}, {tableRaw, "OUTPUT", rule}}
	}
	rule := newRule(`-m conntrack --ctstatus EXPECTED -m comment --comment "spillway: expected by a helper"`)
	return []jump{{tableNAT, "POSTROUTING", rule.jump(c.name)}}
}

// settleHelp notes what the chains must hold. It reports whether that changed.
func (r *ruleset) settleHelp() bool {
	if !r.changed {
		return false
	}
	r.changed = false
	chains, any := r.helpChains(), false
	for table, name := range map[string]string{tableRaw: chainHelpers, tableNAT: chainExpected} {
		before, was := r.want[table][name]
		c, is := chains[table]
		switch {
		case is && (!was || sumOf(c.rules) != before):
			r.wants(table, name, sumOf(c.rules))
			any = true
		case !is && was:
			r.rules[table] -= before.rules
			delete(r.want[table], name)
			any = true
		}
	}
	return any
}

// tables are those of the family that hold rules of ours, or may.
func (f *family) tables() []string {
	if f.raw || len(f.helped) > 0 {
		return []string{tableNAT, tableFilter, tableRaw}
	}
	return tables
}

// findRaw finds out, once, whether an earlier run has left something in table raw.
func (f *family) findRaw(ctx context.Context) error {
	if f.looked {
		return nil
	}
	dumps, err := f.programs.read(ctx, "", nil)
	if err != nil {
		return err
	}
	for _, d := range dumps {
		f.raw = f.raw || d.table == tableRaw && (len(d.chains) > 0 || len(d.jumps) > 0)
	}
	f.looked = true
	return nil
}

// lacksHelper says why the kernel has no such helper; nil if it has it.
func (f *family) lacksHelper(ctx context.Context, h intent.Helper, protocol string) error {
	if h == intent.NoHelper || f.have[h] {
		return nil
	}
	kernel.LoadHelper(h.String())
	err := tryRules(ctx, f.programs, []feature{{h.String(), tableRaw, "-p " + protocol + " -j CT --helper " + kernelName(h), false}})
	if err == nil {
		f.have[h] = true
		return nil
	}
	return fmt.Errorf("served without help, so that transfers fail: the kernel has no %s helper or no target CT (%s): load nf_conntrack_%s, nf_nat_%s and xt_CT, or annotate the Service with %s=none if it is not %s",
		h, strings.TrimSpace(err.Error()), h, h, intent.HelperAnnotation, h)
}

// withHelp returns the ports as they can be served: without a helper that the
// kernel lacks. failed says of which that is true.
func (b *Backend) withHelp(ctx context.Context, ports []*intent.ServicePort, failed map[intent.PortID]error) []*intent.ServicePort {
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
			err = f.lacksHelper(ctx, p.Helper, protocolName(p.ID.Protocol))
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
