package nftables

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// Dropped is a packet that nf_tables has dropped, as it was at the hook.
type Dropped struct {
	Source, Destination netip.AddrPort
	Protocol            model.Protocol
	Hook                string // PREROUTING, INPUT, FORWARD or OUTPUT; what is at others, no policy denies
	FromThisNode        bool   // it came in by no device, or by lo
}

// Denial is what the policies' table says of a packet.
type Denial struct {
	// Policy is the DoNotTrackPolicy whose "deny: others" denies it, the first by
	// name if several do; "" if none does. A name of more than 150 bytes is cut short.
	Policy string
	Chain  string // the base chain that sees to it
	// Before are the chains of others, as TABLE/CHAIN, that see the packet before, or
	// that may: the kernel does not tell which of two of one priority it asks first.
	Before []string
}

// denyingHooks are the base chains that deny, by netfilter's hooks, in order.
var denyingHooks = map[string][]string{
	"PREROUTING": {"prerouting"}, "OUTPUT": {"output", "translated-out"},
	"INPUT": {"translated-here"}, "FORWARD": {"translated-on"},
}

// Enter runs a function in the network namespace that is meant.
type Enter func(func() error) error

// Denied finds the policy that denies a packet, in the policies' table of a network
// namespace. It reads what the kernel holds now, and changes nothing; without the table no
// policy denies. Errors are those of netlink, and enter's.
func Denied(enter Enter, d Dropped) (Denial, error) {
	var out Denial
	if _, carried := carries[d.Protocol]; !carried {
		return out, nil
	}
	q := denialQuestion{Dropped: d, enter: enter, table: nft.Table{Family: unix.NFPROTO_INET, Name: PolicyTable}}
	// A socket stays in the namespace it was opened in. Reading in that namespace would
	// need its thread, and take three times as long.
	if err := enter(q.conn.Open); err != nil {
		return Denial{}, err
	}
	defer q.conn.Close()
	var err error
	for _, out.Chain = range denyingHooks[d.Hook] {
		if out.Policy, err = q.denies(out.Chain); out.Policy != "" || err != nil {
			break
		}
	}
	if err == nil && out.Policy != "" {
		out.Before, err = q.chainsBefore(out.Chain)
	}
	if err != nil {
		return Denial{}, fmt.Errorf("read table %s: %w", PolicyTable, err)
	}
	if out.Policy == "" {
		return Denial{}, nil
	}
	return out, nil
}

// carries are the protocols that policies are about.
var carries = map[model.Protocol]struct{}{model.TCP: {}, model.UDP: {}, model.SCTP: {}}

// denialQuestion is about one packet.
type denialQuestion struct {
	Dropped
	conn  nft.Conn
	table nft.Table
	enter Enter
}

// denies follows the packet through a base chain of the table. A drop is final, and an
// accept ends the chain.
func (q *denialQuestion) denies(chain string) (policy string, err error) {
	f, ends := familyOfAddr(q.Source.Addr()), [2]netip.AddrPort{q.Source, q.Destination}
	other := afterNAT // the stage that the chain does not have
	if translatedHooks[chain] != nil {
		other = beforeNAT
	}
	for _, p := range paths {
		if p.stage == other {
			continue
		}
		key := string(appendPort(appendProto(appendAddr(nil, ends[p.target].Addr()), q.Protocol), ends[p.port].Port()))
		for _, ranges := range []bool{false, true} {
			v, err := q.conn.Element(context.Background(), q.table, p.set(f, ranges), key)
			if err != nil {
				return "", err
			}
			if v == nil {
				continue
			}
			policy, done, err := q.judge(v.Jump, p)
			if policy != "" || done || err != nil {
				return policy, err
			}
		}
	}
	return "", nil
}

// judge evaluates the chain of a verdict for a packet of one path: it returns the policy
// that denies the packet, or whether the packet leaves the table there.
func (q *denialQuestion) judge(chain string, p path) (by string, done bool, err error) {
	rules, err := q.verdictRules(chain)
	if err != nil {
		return "", false, err
	}
	ends := [2]netip.AddrPort{q.Source, q.Destination}
	peer, f := ends[p.peer()].Addr(), familyOfAddr(q.Source.Addr())
	_, tracked := trackedElem(donottrack.Pair{Local: ends[p.target].Addr(), Peer: peer, Protocol: q.Protocol, Port: ends[p.port].Port()})
	for _, r := range rules {
		switch name, denies := strings.CutSuffix(r.comment, deniesOthers); {
		case denies:
			return strings.TrimPrefix(name, policyKind), true, nil
		case r.itself:
			if p.target == nft.Destination && !q.FromThisNode {
				continue
			}
			if is, err := q.isLocal(peer); is || err != nil {
				return "", false, err
			}
			continue
		case r.set != "" && !strings.HasSuffix(r.set, f.Suffix):
			continue
		case r.set != "":
			key := string(peer.AsSlice())
			if r.set == trackedSet(f).Name {
				key = tracked
			}
			if in, err := q.conn.Element(context.Background(), q.table, r.set, key); in == nil || err != nil {
				if err != nil {
					return "", false, err
				}
				continue
			}
		}
		return "", r.accepts, nil
	}
	return "", false, nil
}

// readRule is what a rule of a verdict's chain does.
type readRule struct {
	comment string
	set     string // of peers
	itself  bool   // it compares whether the peer is an address of this node
	accepts bool   // the packet leaves the table
}

func (q *denialQuestion) verdictRules(chain string) (out []readRule, err error) {
	_, err = q.conn.Rules(context.Background(), q.table, func(r nft.ListedRule) bool {
		if r.Chain == chain {
			out = append(out, read(r))
		}
		return true
	})
	return out, err
}

func read(rule nft.ListedRule) readRule {
	r := readRule{comment: rule.Comment}
	for name, data := range nft.Expressions(rule.Expressions) {
		switch name {
		case "fib":
			r.itself = true
		case "lookup":
			r.set = nft.String(nft.Attribute(data, unix.NFTA_LOOKUP_SET))
		case "immediate":
			verdict := nft.Attribute(nft.Attribute(data, unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT)
			if code := nft.Attribute(verdict, unix.NFTA_VERDICT_CODE); code != nil {
				r.accepts = r.accepts || nft.Number(code) == nfAccept
			}
		}
	}
	return r
}

const nfAccept = 1

// isLocal reports whether an address is one of the network namespace's own.
func (q *denialQuestion) isLocal(a netip.Addr) (is bool, err error) {
	if a.IsLoopback() {
		return true, nil
	}
	err = q.enter(func() error {
		addrs, err := net.InterfaceAddrs()
		is = slices.ContainsFunc(addrs, func(have net.Addr) bool {
			p, err := netip.ParsePrefix(have.String())
			return err == nil && p.Addr().Unmap() == a
		})
		return err
	})
	return is, err
}

// chainsBefore are the base chains of others that may have seen a packet at the hook
// before the policies' chain did: those of no later priority that have rules, or drop
// whatever comes.
func (q *denialQuestion) chainsBefore(ours string) (before []string, err error) {
	own, known := policyHooks[ours]
	if !known {
		own = translatedHooks[ours]
	}
	chains, err := q.conn.Chains(context.Background())
	for _, c := range chains {
		sees := c.Table.Family == unix.NFPROTO_INET || c.Table.Family == familyOfAddr(q.Source.Addr()).Family
		if sees && c.MayDrop && c.Table.Name != PolicyTable && c.Hook.Type != "" && c.Hook.Num == own.Num && c.Hook.Priority <= own.Priority {
			before = append(before, c.Table.Name+"/"+c.Name)
		}
	}
	slices.Sort(before)
	return before, err
}
