package nftables

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// leftPolicies is the suffix of the table of remaining connections, which deleted policies
// left untracked:
//
//	postrouting (nat, before every masquerade)
//	  TCP without SYN, source . protocol . source port in left4       snat to the source
//	  TCP without SYN, destination . protocol . port in left4         snat to the source
//	  others, source . protocol . source port in left4                snat to the source
//
// When a policy is deleted, conntrack takes the next packet of an untracked connection for
// the first one: a reply, or data. A CNI that masquerades connections of pods would give it
// another source, which the receiver does not know. Chains of type nat see only the first
// packet, and the first of them that decides wins: this one keeps the source. The kernel
// expires the elements.
//
// It is a table of its own. Neither the next agent nor a full sync reads it, and the table of
// policies stays as it is.
const leftPolicies = "-left"

const (
	// leftFor bounds the silence of TCP connections after the deletion of their policy.
	leftFor = 24 * time.Hour
	// leftForOthers is shorter: without SYN, replies cannot be distinguished from a pod's
	// own packets from its port.
	leftForOthers = 5 * time.Minute
	// leftLooks is the interval of looking whether the table is empty.
	leftLooks = 5 * time.Minute
	tcpSYN    = 0x02
)

// leftHook comes before every masquerade, and before the nat chains of Services.
var leftHook = &nft.Hook{Type: "nat", Num: unix.NF_INET_POST_ROUTING, Priority: 97}

// leftSets returns the set of single ports, and the set of addresses with ranges of ports, in
// which ports are not distinguished.
func leftSets(f *nft.IP) (ports, hosts *nft.Set) {
	return &nft.Set{Name: "left" + f.Suffix, Comment: "ports that were not tracked",
			Key: []nft.Field{nft.AddrField(f), nft.ProtocolField, nft.PortField}, Expires: true},
		&nft.Set{Name: "left-hosts" + f.Suffix, Comment: "with ranges of such ports",
			Key: []nft.Field{nft.AddrField(f), nft.ProtocolField}, Expires: true}
}

// leftElems returns elements of leftSets: the targets that the edit removes from the sets of
// requests, or gives to a verdict that tracks.
func (e *policyEdit) leftElems(next *doNotTrackTable) map[string]*elemList {
	out := map[string]*elemList{}
	for _, f := range families {
		ports, hosts := leftSets(f)
		add := func(s *nft.Set, key string) {
			if out[s.Name] == nil {
				out[s.Name] = &elemList{}
			}
			v := &nft.Value{Timeout: leftForOthers}
			if model.Protocol(key[f.Size]) == model.TCP {
				v.Timeout = leftFor
			}
			out[s.Name].add(key, v)
		}
		for _, ranges := range []bool{false, true} {
			for key, c := range e.elems[paths[0].set(f, ranges)] {
				switch tcp := model.Protocol(key[f.Size]) == model.TCP; {
				case c.had == nil || c.want != nil && !next.tracks(c.want.Jump):
				case !ranges:
					add(ports, key)
				case tcp: // of others whatever comes from the address would be meant
					if host := key[:f.Size+4]; out[hosts.Name] == nil || !slices.Contains(out[hosts.Name].keys, host) {
						add(hosts, host)
					}
				}
			}
		}
	}
	return out
}

// found adds the targets of sets of requests that were found and are not wanted, as removed.
func (e *policyEdit) found(have *nft.Listing, want *doNotTrackTable) {
	for _, f := range families {
		for _, ranges := range []bool{false, true} {
			name := paths[0].set(f, ranges)
			if fs := have.Sets[name]; fs != nil && want.sets[name] == nil {
				for key, v := range fs.Elements {
					e.set(name, key, v, nil)
				}
			}
		}
	}
}

// tracks reports whether what comes to a chain of requests is tracked, if there is one.
func (t *doNotTrackTable) tracks(chain string) bool {
	v := t.verdicts[strings.TrimSuffix(chain, "-from")]
	return v != nil && v.Track
}

// leave returns what adds the removed targets to the table of remaining connections. It is
// committed with their removal, so that no packet arrives in between.
func (p *Policies) leave(ctx context.Context, e *policyEdit, next *doNotTrackTable) *nft.Transaction {
	tx, elems := nft.NewTransaction(p.leftTable()), e.leftElems(next)
	p.nat = p.nat || len(elems) > 0 && p.translated(ctx)
	if len(elems) == 0 || !p.nat {
		return tx // without masquerading, a nat chain would only make conntrack see all traffic
	}
	if !p.leftMade {
		addLeft(tx)
	}
	for _, name := range slices.Sorted(maps.Keys(elems)) {
		tx.AddElements(name, elems[name].values())
	}
	p.leftMade = true
	return tx
}

func (p *Policies) leftTable() nft.Table {
	t := p.nftTable
	t.Name += leftPolicies
	t.Comment = "connections whose DoNotTrackPolicy is gone, kept by spillway: goes by itself"
	return t
}

// addLeft adds the table of remaining connections, unless it exists.
func addLeft(tx *nft.Transaction) {
	tx.AddTable()
	c := &nft.Chain{Name: "postrouting", Hook: leftHook}
	for _, f := range families {
		ports, hosts := leftSets(f)
		tx.AddSet(ports)
		tx.AddSet(hosts)
		c.Rules = append(c.Rules, leftRules(f, ports, hosts)...)
	}
	tx.AddChain(c)
	tx.FlushChain(c.Name) // of the same rules, if they exist
}

func leftRules(f *nft.IP, ports, hosts *nft.Set) (out []*nft.Rule) {
	key := func(r *nft.Rule, end nft.End, s *nft.Set) *nft.Rule {
		r.Addr(f, end, nft.Reg).Meta(unix.NFT_META_L4PROTO, nft.Reg+f.Regs())
		if s == ports {
			r.Port(end, nft.Reg+f.Regs()+1)
		}
		return r.In(s.Name, nft.Reg).Addr(f, nft.Source, nft.Reg).SNAT(f)
	}
	for _, s := range []*nft.Set{ports, hosts} {
		for end, comment := range []string{"answers that run", "data that comes"} {
			r := (&nft.Rule{Comment: comment}).Version(f).Protocol(unix.NFT_CMP_EQ, unix.IPPROTO_TCP)
			out = append(out, key(withoutSYN(r), nft.End(end), s))
		}
	}
	others := (&nft.Rule{Comment: "answers that run"}).Version(f).Protocol(unix.NFT_CMP_NEQ, unix.IPPROTO_TCP)
	return append(out, key(others, nft.Source, ports))
}

func withoutSYN(r *nft.Rule) *nft.Rule {
	r.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1, nft.Reg)
	return r.And(nft.Reg, []byte{tcpSYN}).Cmp(unix.NFT_CMP_EQ, nft.Reg, []byte{0})
}

// translated reports whether any program translates addresses in this network namespace.
func (p *Policies) translated(ctx context.Context) bool {
	for _, names := range []string{"ip_tables_names", "ip6_tables_names"} {
		text, _ := os.ReadFile("/proc/thread-self/net/" + names) // none: no legacy iptables
		if slices.Contains(strings.Fields(string(text)), "nat") {
			return true
		}
	}
	chains, _ := p.conn.Chains(ctx)
	return slices.ContainsFunc(chains, func(c *nft.ListedChain) bool {
		return c.Hook.Type == "nat" && !strings.HasSuffix(c.Table.Name, leftPolicies)
	})
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
		return fmt.Errorf("read table %s: %w", p.leftTable().Name, err)
	}
	// A program that translates may be rewriting its rules, or stopping: forgetLeft checks
	// twice.
	before := p.nat || p.leftLook.IsZero()
	p.leftLook, p.leftMade, p.nat = now.Add(leftLooks), there, there && p.translated(ctx)
	if !there || holds && (p.nat || before) {
		return nil
	}
	p.leftMade = false
	return Cleanup(ctx, Config{Table: p.leftTable().Name})
}

// readLeft reports whether the table of remaining connections exists, and whether it has an
// element that has not expired.
func (p *Policies) readLeft(ctx context.Context) (there, holds bool, err error) {
	for _, f := range families {
		ports, hosts := leftSets(f)
		for _, set := range []*nft.Set{ports, hosts} {
			elements, err := p.conn.Elements(ctx, p.leftTable(), set.Name)
			if err != nil {
				return there, holds, err
			}
			there, holds = there || elements != nil, holds || len(elements) > 0
		}
	}
	return there, holds, nil
}
