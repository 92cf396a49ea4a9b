package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
)

// leftPolicies is the table of what policies were about and are not any more:
//
//	postrouting (nat, before all who masquerade)
//	  TCP without SYN, source . protocol . source port in left4       snat to the source
//	  TCP without SYN, destination . protocol . port in left4         snat to the source
//	  others, source . protocol . source port in left4                snat to the source
//
// Of a connection that ran untracked when its policy went, conntrack takes whichever
// packet comes first for the first of a connection: an answer, or data. A CNI that
// masquerades what pods begin would give it another source, which its receiver knows
// nothing of. Chains of nat see the first packet alone, and who is first to decide
// decides: here, that the source stays. Elements go by the kernel's clock.
//
// It is a table of its own. Neither the next agent nor a full sync reads it, and the table of
// policies stays as it is.
const leftPolicies = "-left"

const (
	// leftFor is how long connections over TCP may be silent after their policy went.
	leftFor = 24 * time.Hour
	// leftForOthers is shorter: without SYN, replies cannot be distinguished from a pod's
	// own packets from its port.
	leftForOthers = 5 * time.Minute
	// leftLooks is how often it is looked whether all has gone.
	leftLooks = 5 * time.Minute
	tcpSYN    = 0x02
)

// leftHook comes before every masquerade, and before the nat chains of Services.
var leftHook = &hook{"nat", unix.NF_INET_POST_ROUTING, 97}

// leftSets are the set of single ports, and that of addresses with ranges of ports,
// which are not told apart there.
func leftSets(f *family) (ports, hosts *set) {
	return &set{name: "left" + f.suffix, comment: "ports that were not tracked", key: []field{addrField(f), protoField, portField}, expires: true},
		&set{name: "left-hosts" + f.suffix, comment: "with ranges of such ports", key: []field{addrField(f), protoField}, expires: true}
}

// leftElems are the targets that go, as elements of leftSets: of those that what is in
// edit takes out of the sets of requests, or gives to a verdict that tracks.
func (e *policyEdit) leftElems(next *policyTable) map[string]*elemList {
	out := map[string]*elemList{}
	for _, f := range []*family{&ipv4, &ipv6} {
		ports, hosts := leftSets(f)
		add := func(s *set, key string) {
			if out[s.name] == nil {
				out[s.name] = &elemList{set: s}
			}
			v := &value{timeout: leftForOthers}
			if model.Protocol(key[f.size]) == model.TCP {
				v.timeout = leftFor
			}
			out[s.name].add(key, v)
		}
		for _, ranges := range []bool{false, true} {
			for key, c := range e.elems[ways[0].set(f, ranges)] {
				switch tcp := model.Protocol(key[f.size]) == model.TCP; {
				case c.had == nil || c.want != nil && !next.tracks(c.want.jump):
				case !ranges:
					add(ports, key)
				case tcp: // of others whatever comes from the address would be meant
					if host := key[:f.size+4]; out[hosts.name] == nil || !slices.Contains(out[hosts.name].keys, host) {
						add(hosts, host)
					}
				}
			}
		}
	}
	return out
}

// found enters what was found of the sets of requests that are not to be there any
// more, as what goes.
func (e *policyEdit) found(img *image, want *policyTable) {
	for _, f := range []*family{&ipv4, &ipv6} {
		for _, ranges := range []bool{false, true} {
			name := ways[0].set(f, ranges)
			if fs := img.sets[name]; fs != nil && want.sets[name] == nil {
				for key, v := range fs.elems {
					e.set(name, key, v, nil)
				}
			}
		}
	}
}

// tracks reports whether what comes to a chain of requests is tracked, if there is one.
func (t *policyTable) tracks(chain string) bool {
	v := t.verdicts[strings.TrimSuffix(chain, "-from")]
	return v != nil && v.Track
}

// leave writes what goes into the table of what is left, in the same batch, so that no
// packet comes in between.
func (p *Policies) leave(ctx context.Context, b *batch, e *policyEdit, next *policyTable) {
	elems := e.leftElems(next)
	p.nat = p.nat || len(elems) > 0 && p.link.translated(ctx)
	if len(elems) == 0 || !p.nat {
		return // without masquerading, a nat chain would only make conntrack see all traffic
	}
	table, about := b.table, b.about
	b.table, b.about = table+leftPolicies, "connections whose DoNotTrackPolicy is gone, kept by spillway: goes by itself"
	if !p.leftMade {
		b.addLeft()
	}
	for _, name := range slices.Sorted(maps.Keys(elems)) {
		elems[name].write(b, unix.NFT_MSG_NEWSETELEM)
	}
	b.table, b.about = table, about
	p.leftMade = true
}

// addLeft makes the table of what is left, or leaves it as it is.
func (b *batch) addLeft() {
	b.addTable()
	c := &chain{name: "postrouting", hook: leftHook}
	for _, f := range []*family{&ipv4, &ipv6} {
		ports, hosts := leftSets(f)
		b.addSet(ports)
		b.addSet(hosts)
		c.rules = append(c.rules, leftRules(f, ports, hosts)...)
	}
	b.addChain(c)
	b.flushChain(c.name) // of the same rules, if they were there
	b.addRules(c)
}

func leftRules(f *family, ports, hosts *set) (out []*rule) {
	key := func(r *rule, which int, s *set) *rule {
		r.address(f, which, firstReg).meta(unix.NFT_META_L4PROTO, firstReg+f.regs())
		if s == ports {
			r.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, uint32(2*which), 2, firstReg+f.regs()+1)
		}
		return r.in(s, firstReg).source(f, firstReg).snat(f)
	}
	for _, s := range []*set{ports, hosts} {
		for which, comment := range []string{"answers that run", "data that comes"} {
			out = append(out, key((&rule{comment: comment}).only(f).tcp(unix.NFT_CMP_EQ).noTCPFlag(tcpSYN), which, s))
		}
	}
	return append(out, key((&rule{comment: "answers that run"}).only(f).tcp(unix.NFT_CMP_NEQ), 0, ports))
}

// tcp goes on with TCP, or with all else.
func (r *rule) tcp(op uint32) *rule {
	return r.meta(unix.NFT_META_L4PROTO, firstReg).cmp(op, firstReg, []byte{unix.IPPROTO_TCP})
}

// noTCPFlag goes on if none of the flags is set.
func (r *rule) noTCPFlag(flags byte) *rule {
	r.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1, firstReg).add("bitwise", func(a *attrs) {
		a.u32(unix.NFTA_BITWISE_SREG, firstReg)
		a.u32(unix.NFTA_BITWISE_DREG, firstReg)
		a.u32(unix.NFTA_BITWISE_LEN, 1)
		for _, v := range []struct {
			typ  uint16
			bits byte
		}{{unix.NFTA_BITWISE_MASK, flags}, {unix.NFTA_BITWISE_XOR, 0}} {
			at := a.nest(v.typ)
			a.bytes(unix.NFTA_DATA_VALUE, []byte{v.bits})
			a.close(at)
		}
	})
	return r.cmp(unix.NFT_CMP_EQ, firstReg, []byte{0})
}

// translated reports whether any program translates addresses in this network namespace.
func (b *Backend) translated(ctx context.Context) (yes bool) {
	for _, names := range []string{"ip_tables_names", "ip6_tables_names"} {
		text, _ := os.ReadFile("/proc/thread-self/net/" + names) // none: no legacy iptables
		yes = yes || slices.Contains(strings.Fields(string(text)), "nat")
	}
	if yes {
		return true
	}
	_ = b.do(ctx, func(s *socket) error {
		return s.each(unix.NFT_MSG_GETCHAIN, netlink.Dump, attrs{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0}, func(m netlink.Message) {
			nat, left := false, false
			for typ, v := range attributes(m) {
				nat = nat || typ == unix.NFTA_CHAIN_TYPE && cString(v) == "nat"
				left = left || typ == unix.NFTA_CHAIN_TABLE && strings.HasSuffix(cString(v), leftPolicies)
			}
			yes = yes || nat && !left
		})
	})
	return yes
}

// forgetLeft deletes the table of remaining connections when it is empty or no program
// translates: its chain makes conntrack see all traffic. It asks the kernel, because an
// earlier agent may have created the table.
func (p *Policies) forgetLeft(ctx context.Context) error {
	now := time.Now()
	if now.Before(p.leftLook) {
		return nil
	}
	there, holds, err := p.readLeft(ctx)
	if err != nil {
		return fmt.Errorf("read table %s: %w", p.link.cfg.Table+leftPolicies, err)
	}
	// A program that translates may be rewriting its rules, or stopping: forgetLeft checks
	// twice.
	before := p.nat || p.leftLook.IsZero()
	p.leftLook, p.leftMade, p.nat = now.Add(leftLooks), there, there && p.link.translated(ctx)
	if !there || holds && (p.nat || before) {
		return nil
	}
	p.leftMade = false
	return Cleanup(ctx, Config{Table: p.link.cfg.Table + leftPolicies})
}

// readLeft reports whether the table of what is left is there, and holds anything that
// has not expired.
func (p *Policies) readLeft(ctx context.Context) (there, holds bool, err error) {
	err = p.link.do(ctx, func(s *socket) error {
		for _, f := range []*family{&ipv4, &ipv6} {
			ports, hosts := leftSets(f)
			for _, set := range []*set{ports, hosts} {
				fs := &foundSet{elems: map[string]*value{}}
				err := s.dumpElements(p.link.cfg.Table+leftPolicies, set.name, fs)
				if errors.Is(err, unix.ENOENT) {
					continue
				}
				if err != nil {
					return err
				}
				there, holds = true, holds || len(fs.elems) > 0
			}
		}
		return nil
	})
	return there, holds, err
}
