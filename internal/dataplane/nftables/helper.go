package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// Service ports of a protocol that opens a second port have the kernel's helper
// for it. It is given to a connection by its first packet, before that is
// translated: nf_nat then knows that the stream's length may change (FTP), and
// translates what the helper expects as it did the connection itself.
//
//	services4-tftp       addresses of such Services, and endpoints here
//	nodeports4-tftp      their NodePorts
//	helped-endpoints4    addresses of those endpoints
//
// An endpoint here may be asked by another node, which has translated already.
// This node's conntrack then has nothing to translate, and what it expects is
// open to anybody's rules: a CNI would masquerade a TFTP server's answer, which
// begins a connection, and the other node would not know it. Chain "as-it-is"
// comes before those rules and says that its source stays.
const chainAsItIs = "as-it-is"

// helper is one of the kernel's, as an object of the table. It is there while one
// of its sets is.
type helper struct {
	kind     intent.Helper
	name     string // the kernel's, and the object's
	protocol model.Protocol
	sets     []*set
}

// kernelName is what the kernel calls a helper. Tests name one that it lacks.
var kernelName = intent.Helper.String

// newHelpers adds the sets of all helpers to a layout whose bases are there.
func (l *layout) newHelpers() {
	for i := range l.common {
		c := &l.common[i]
		c.endpointsWithHelper = l.add(&set{name: "helped-endpoints" + c.family.suffix, key: []field{addrField(c.family)}, shared: true, comment: "endpoints here whose connections have a helper"})
		c.ftpEndpoints = l.add(&set{name: "ftp-endpoints" + c.family.suffix, key: []field{addrField(c.family)}, shared: true, comment: "endpoints of Services that speak FTP"})
		c.ftpBlock = l.add(&set{
			name: "cut-off" + c.family.suffix, key: []field{addrField(c.family), addrField(c.family)}, size: cutOffLimit,
			with: []*set{c.ftpEndpoints}, comment: "who asked, and who had announced what is not his",
		})
	}
	for _, b := range l.bases() {
		key := append(slices.Clone(b.frontends.key), addrField(b.family))
		b.own = l.add(&set{name: b.name + "-own", key: key, shared: true, comment: "ports that endpoints of FTP may announce as their Service's"})
	}
	for _, h := range []*helper{
		{kind: intent.TFTP, name: kernelName(intent.TFTP), protocol: model.UDP},
		{kind: intent.FTP, name: kernelName(intent.FTP), protocol: model.TCP},
	} {
		for _, b := range l.bases() {
			s := l.add(&set{name: b.name + "-" + h.name, key: b.frontends.key, shared: true, comment: "whose connections have the helper " + h.name})
			if b.withHelper == nil {
				b.withHelper = map[intent.Helper]*set{}
			}
			b.withHelper[h.kind] = s
			h.sets = append(h.sets, s)
		}
		l.helpers = append(l.helpers, h)
	}
}

// needsHelper tells whether a set is one of a helper.
func (l *layout) needsHelper(s *set) bool {
	return slices.ContainsFunc(l.helpers, func(h *helper) bool { return slices.Contains(h.sets, s) })
}

// addHelper renders what a port with a helper adds: its frontends, and its endpoints
// here.
func (r *rendering) addHelper(l *layout, p *intent.ServicePort) {
	i := familyIndex(p.ID.Family)
	if p.OfFTP {
		r.own(l, p)
	}
	if p.Helper == intent.NoHelper {
		return
	}
	for j := range p.Frontends {
		f := &p.Frontends[j]
		key := appendPort(appendProto(nil, p.ID.Protocol), f.Port)
		if f.Kind == intent.NodePort {
			r.add(l.nodePorts[i].withHelper[p.Helper], string(key), value{})
			continue
		}
		r.add(l.addresses[i].withHelper[p.Helper], string(append(appendAddr(nil, f.Addr), key...)), value{})
	}
	for _, e := range p.Endpoints {
		if p.Helper == intent.FTP {
			r.add(l.common[i].ftpEndpoints, string(appendAddr(nil, e.Addr.Addr())), value{})
		}
		if !e.OnThisNode {
			continue
		}
		addr := appendAddr(nil, e.Addr.Addr())
		r.add(l.common[i].endpointsWithHelper, string(addr), value{})
		r.add(l.addresses[i].withHelper[p.Helper], string(appendPort(appendProto(addr, p.ID.Protocol), e.Addr.Port())), value{})
	}
}

// assign gives connections their helper, without an end to the way that their
// first packet goes.
func (rs *ruleset) assign() (out []*rule) {
	for _, h := range rs.layout.helpers {
		for _, b := range rs.layout.bases() {
			s := b.withHelper[h.kind]
			if !rs.exists(s) {
				continue
			}
			r := (&rule{}).only(b.family)
			if b.nodePort {
				r.destination(b.family, firstReg).in(rs.layout.commonOf(b.family).nodePortAddrs, firstReg)
			}
			out = append(out, b.key(r).in(s, firstReg).object(unix.NFT_OBJECT_CT_HELPER, h.name))
		}
	}
	return out
}

// asItIs writes the rules that keep the source of connections that a helper expects from
// an endpoint of this node and that no rule has translated yet.
func (rs *ruleset) asItIs() {
	var rules []*rule
	for i := range rs.layout.common {
		c := &rs.layout.common[i]
		if rs.exists(c.endpointsWithHelper) {
			r := (&rule{comment: "a helper expects it"}).ct(unix.NFT_CT_STATUS, firstReg).anyBit(firstReg, ctStatusExpected)
			r.only(c.family).source(c.family, firstReg).in(c.endpointsWithHelper, firstReg)
			rules = append(rules, r.source(c.family, firstReg).snat(c.family))
		}
	}
	if rules != nil {
		rs.chains = append(rs.chains, hooked(chainAsItIs, rules))
	}
}

// object refers to an object of the table.
func (r *rule) object(typ uint32, name string) *rule {
	return r.add("objref", func(a *attrs) {
		a.u32(unix.NFTA_OBJREF_IMM_TYPE, typ)
		a.str(unix.NFTA_OBJREF_IMM_NAME, name)
	})
}

// snat gives the packet the source at firstReg.
func (r *rule) snat(f *family) *rule {
	return r.add("nat", func(a *attrs) {
		a.u32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
		a.u32(unix.NFTA_NAT_FAMILY, f.proto)
		a.u32(unix.NFTA_NAT_REG_ADDR_MIN, firstReg)
	})
}

func (b *batch) addHelper(h *helper) {
	b.message(unix.NFT_MSG_NEWOBJ, netlink.Create, func(a *attrs) {
		a.str(unix.NFTA_OBJ_TABLE, b.table)
		a.str(unix.NFTA_OBJ_NAME, h.name)
		a.u32(unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_CT_HELPER)
		at := a.nest(unix.NFTA_OBJ_DATA)
		a.str(unix.NFTA_CT_HELPER_NAME, h.name)
		a.bytes(unix.NFTA_CT_HELPER_L4PROTO, []byte{byte(h.protocol)})
		a.close(at)
	})
}

func (b *batch) delHelper(name string) {
	b.message(unix.NFT_MSG_DELOBJ, 0, func(a *attrs) {
		a.str(unix.NFTA_OBJ_TABLE, b.table)
		a.str(unix.NFTA_OBJ_NAME, name)
		a.u32(unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_CT_HELPER)
	})
}

// helpersOf lists helpers that come, and names of those that go.
func (c *change) helpersOf(p *plan) (comes []*helper, goes []string) {
	for _, h := range c.t.layout.helpers {
		if slices.ContainsFunc(h.sets, func(s *set) bool { return p.exists[s.name] }) {
			p.helpers[h.name] = true
			if !c.t.helpers[h.name] {
				comes = append(comes, h)
				p.repair.Note(1, 0, "ct helper "+h.name)
			}
		}
	}
	for _, n := range slices.Sorted(maps.Keys(c.t.helpers)) {
		if !p.helpers[n] {
			goes = append(goes, n)
			p.repair.Note(0, 1, "ct helper "+n)
		}
	}
	return comes, goes
}

// addObject notes a helper as the kernel tells it.
func (img *image) addObject(m netlink.Message) {
	name, typ := "", uint32(0)
	for t, v := range attributes(m) {
		switch t {
		case unix.NFTA_OBJ_NAME:
			name = cString(v)
		case unix.NFTA_OBJ_TYPE:
			typ = number(v)
		}
	}
	if typ == unix.NFT_OBJECT_CT_HELPER {
		img.helpers[name] = true
	}
}

// missingHelper says why the kernel has no such helper; nil if it has it.
func (b *Backend) missingHelper(ctx context.Context, kind intent.Helper) error {
	if kind == intent.NoHelper || b.have[kind] {
		return nil
	}
	kernel.LoadHelper(kind.String())
	err := b.do(ctx, func(s *socket) error {
		batch := &batch{table: b.cfg.Table + "-probe"}
		batch.addTable()
		for _, h := range newLayout().helpers {
			if h.kind == kind {
				batch.addHelper(h)
			}
		}
		return s.commit(batch, false)
	})
	if err == nil {
		b.have[kind] = true
		return nil
	}
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("ask the kernel for its %s helper: %w", kind, err)
	}
	return fmt.Errorf("served without help, so that transfers fail: the kernel has no %s helper: load nf_conntrack_%s and nf_nat_%s, or annotate the Service with %s=none if it is not %s",
		kind, kind, kind, intent.HelperAnnotation, kind)
}

// checkHelpers returns the ports as they can be served: without a helper that the
// kernel lacks. failed says of which that is true.
func (b *Backend) checkHelpers(ctx context.Context, ports []*intent.ServicePort, failed map[intent.PortID]error) []*intent.ServicePort {
	out, lacks := ports, map[intent.Helper]error{}
	for i, p := range ports {
		err, asked := lacks[p.Helper]
		if !asked {
			err = b.missingHelper(ctx, p.Helper)
			lacks[p.Helper] = err
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
