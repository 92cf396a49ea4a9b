package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/nft"
)

// Service ports of a protocol that opens a second port have the kernel's helper
// for it. It is given to a connection by its first packet, before that is
// translated: nf_nat then knows that the stream's length may change (FTP), and
// translates what the helper expects as it did the connection itself.
//
//	services4-tftp       addresses of such Services, and of their endpoints on this node
//	nodeports4-tftp      their NodePorts
//	helped-endpoints4    addresses of those endpoints
//
// Another node may have translated a request to an endpoint of this node. This node's
// conntrack then translates nothing, and any program's rules apply to the connection that
// the helper expects: a CNI would masquerade a TFTP server's answer, which begins a
// connection, and the other node would not recognize it. Chain "as-it-is"
// comes before those rules and says that its source stays.
const chainAsItIs = "as-it-is"

// helper is one of the kernel's, as an object of the table.
type helper struct {
	nft.Helper
	kind intent.Helper
	sets []*set // it exists while one of these does
}

// kernelName is what the kernel calls a helper. Tests name one that it lacks.
var kernelName = intent.Helper.String

// newHelpers adds the sets of all helpers to a layout whose bases are there.
func (l *layout) newHelpers() {
	for i := range l.common {
		c := &l.common[i]
		c.endpointsWithHelper = l.shared(nft.Set{Name: "helped-endpoints" + c.family.Suffix, Key: []nft.Field{nft.AddrField(c.family)},
			Comment: "endpoints here whose connections have a helper"})
		c.ftpEndpoints = l.shared(nft.Set{Name: "ftp-endpoints" + c.family.Suffix, Key: []nft.Field{nft.AddrField(c.family)},
			Comment: "endpoints of Services that speak FTP"})
		c.ftpBlock = l.add(nft.Set{
			Name: "cut-off" + c.family.Suffix, Key: []nft.Field{nft.AddrField(c.family), nft.AddrField(c.family)}, Size: cutOffLimit,
			Comment: "who asked, and who had announced what is not his",
		})
		c.ftpBlock.with = []*set{c.ftpEndpoints}
	}
	for _, b := range l.bases() {
		key := append(slices.Clone(b.frontends.Key), nft.AddrField(b.family))
		b.own = l.shared(nft.Set{Name: b.name + "-own", Key: key, Comment: "ports that endpoints of FTP may announce as their Service's"})
	}
	for _, h := range []*helper{
		{kind: intent.TFTP, Helper: nft.Helper{Name: kernelName(intent.TFTP), Protocol: uint8(model.UDP)}},
		{kind: intent.FTP, Helper: nft.Helper{Name: kernelName(intent.FTP), Protocol: uint8(model.TCP)}},
	} {
		for _, b := range l.bases() {
			s := l.shared(nft.Set{Name: b.name + "-" + h.Name, Key: b.frontends.Key, Comment: "whose connections have the helper " + h.Name})
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

// addHelper renders what a port with a helper adds: its frontends, and its endpoints on this
// node.
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
			r.add(l.nodePorts[i].withHelper[p.Helper], string(key), nft.Value{})
			continue
		}
		r.add(l.addresses[i].withHelper[p.Helper], string(append(appendAddr(nil, f.Addr), key...)), nft.Value{})
	}
	for _, e := range p.Endpoints {
		if p.Helper == intent.FTP {
			r.add(l.common[i].ftpEndpoints, string(appendAddr(nil, e.Addr.Addr())), nft.Value{})
		}
		if !e.OnThisNode {
			continue
		}
		addr := appendAddr(nil, e.Addr.Addr())
		r.add(l.common[i].endpointsWithHelper, string(addr), nft.Value{})
		r.add(l.addresses[i].withHelper[p.Helper], string(appendPort(appendProto(addr, p.ID.Protocol), e.Addr.Port())), nft.Value{})
	}
}

// assign gives connections their helper. The first packet continues in the chain.
func (rs *ruleset) assign() (out []*nft.Rule) {
	for _, h := range rs.layout.helpers {
		for _, b := range rs.layout.bases() {
			s := b.withHelper[h.kind]
			if !rs.exists(s) {
				continue
			}
			r := (&nft.Rule{}).Version(b.family)
			if b.nodePort {
				r.Addr(b.family, nft.Destination, nft.Reg).In(rs.layout.commonOf(b.family).nodePortAddrs.Name, nft.Reg)
			}
			out = append(out, b.key(r).In(s.Name, nft.Reg).Helper(h.Name))
		}
	}
	return out
}

// keepExpectedSources writes the rules that keep the source of connections that a helper expects from
// an endpoint of this node and that no rule has translated yet.
func (rs *ruleset) keepExpectedSources() {
	var rules []*nft.Rule
	for i := range rs.layout.common {
		c := &rs.layout.common[i]
		if rs.exists(c.endpointsWithHelper) {
			r := (&nft.Rule{Comment: "a helper expects it"}).Ct(unix.NFT_CT_STATUS, nft.Reg).AnyBit(nft.Reg, nft.CtStatusExpected)
			r.Version(c.family).Addr(c.family, nft.Source, nft.Reg).In(c.endpointsWithHelper.Name, nft.Reg)
			rules = append(rules, r.Addr(c.family, nft.Source, nft.Reg).SNAT(c.family))
		}
	}
	if rules != nil {
		rs.chains = append(rs.chains, hooked(chainAsItIs, rules))
	}
}

// missingHelper says why the kernel has no such helper; nil if it has it.
func (b *Backend) missingHelper(ctx context.Context, kind intent.Helper) error {
	if kind == intent.NoHelper || b.have[kind] {
		return nil
	}
	kernel.LoadHelper(kind.String())
	of := b.nftTable
	of.Name += "-probe"
	tx := nft.NewTransaction(of)
	tx.AddTable()
	for _, h := range newLayout().helpers {
		if h.kind == kind {
			tx.AddHelper(h.Helper)
		}
	}
	err := b.conn.Check(ctx, tx)
	if err == nil {
		b.have[kind] = true
		return nil
	}
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("ask the kernel for its %s helper: %w", kind, err)
	}
	return fmt.Errorf("served without help, so that transfers fail: the kernel has no %s helper: load nf_conntrack_%s and nf_nat_%s, or "+
		"annotate the Service with %s=none if it is not %s",
		kind, kind, kind, intent.HelperAnnotation, kind)
}

// checkHelpers returns the ports as they can be served: without a helper that the
// kernel lacks. failed says of which that is true.
func (b *Backend) checkHelpers(ctx context.Context, ports []*intent.ServicePort, failed map[intent.PortID]error) []*intent.ServicePort {
	out, lacks := ports, map[intent.Helper]error{}
	for i, p := range ports {
		err, known := lacks[p.Helper]
		if !known {
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
