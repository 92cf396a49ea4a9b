package nftables

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/model"
)

// Dropped is a packet that nf_tables has dropped, as it was at the hook.
type Dropped struct {
	Source, Destination netip.AddrPort
	Protocol            model.Protocol
	Hook                string // PREROUTING, INPUT, FORWARD or OUTPUT; what is at others, no policy denies
	FromHere            bool   // it came in by no device, or by lo
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

// denyingHooks are the base chains that deny, by netfilter's hooks.
var denyingHooks = map[string]string{
	"PREROUTING": "prerouting", "OUTPUT": "output",
	"INPUT": "translated-here", "FORWARD": "translated-on",
}

// Enter runs a function in the network namespace that is meant.
type Enter func(func() error) error

// Denied finds the policy that denies a packet, in the policies' table of a network
// namespace. It reads what the kernel holds now, and changes nothing; without the table no
// policy denies. Errors are those of netlink, and enter's.
func Denied(enter Enter, d Dropped) (Denial, error) {
	out := Denial{Chain: denyingHooks[d.Hook]}
	if _, carried := carries[d.Protocol]; !carried || out.Chain == "" {
		return Denial{}, nil
	}
	q := denialQuestion{Dropped: d, enter: enter}
	// A socket stays in the namespace it was opened in. What waits for answers need not
	// keep a thread there, which takes three times as long.
	err := enter(func() (err error) { q.socket, err = dial(); return err })
	if err != nil {
		return Denial{}, err
	}
	defer q.close()
	if out.Policy, err = q.denies(); err == nil && out.Policy != "" {
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
	*socket
	Dropped
	enter Enter
}

// denies goes the packet's way through the table, as its base chains do. A drop is
// final, and so is it when a chain accepts.
func (q *denialQuestion) denies() (policy string, err error) {
	f, ends := familyOfAddr(q.Source.Addr()), [2]netip.AddrPort{q.Source, q.Destination}
	_, asksOnly := translatedHooks[denyingHooks[q.Hook]]
	for _, w := range ways {
		if asksOnly && !w.asks {
			continue
		}
		key := string(appendPort(appendProto(appendAddr(nil, ends[w.here].Addr()), q.Protocol), ends[w.port].Port()))
		for _, ranges := range []bool{false, true} {
			v, err := q.element(w.set(f, ranges), key)
			if err != nil {
				return "", err
			}
			if v == nil {
				continue
			}
			policy, done, err := q.judge(v.jump, w)
			if policy != "" || done || err != nil {
				return policy, err
			}
		}
	}
	return "", nil
}

// element is the element of a set that a key is in, nil if there is none, or no such
// set, or no table.
func (s *socket) element(set, key string) (found *value, err error) {
	a := attrs{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}
	a.str(unix.NFTA_SET_ELEM_LIST_TABLE, PolicyTable)
	a.str(unix.NFTA_SET_ELEM_LIST_SET, set)
	list := a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	at := a.nest(unix.NFTA_LIST_ELEM)
	a.element(key, &value{}, false)
	a.close(at)
	a.close(list)
	err = s.each(unix.NFT_MSG_GETSETELEM, 0, a, func(m netlink.Message) {
		for typ, list := range attributes(m) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				continue
			}
			for _, e := range nested(list) {
				_, found = readElement(e)
			}
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return found, err
}

// judge evaluates the chain of a verdict for a packet in one direction: it returns the
// policy that denies the packet, or whether the packet's path through the table ends
// there.
func (q *denialQuestion) judge(chain string, w way) (by string, done bool, err error) {
	rules, err := q.verdictRules(chain)
	if err != nil {
		return "", false, err
	}
	ends := [2]netip.AddrPort{q.Source, q.Destination}
	peer, f := ends[1-w.here].Addr(), familyOfAddr(q.Source.Addr())
	_, kept := trackedElem(policy.Pair{Here: ends[w.here].Addr(), Peer: peer, Protocol: q.Protocol, Port: ends[w.port].Port()})
	for _, r := range rules {
		switch name, denies := strings.CutSuffix(r.comment, deniesOthers); {
		case denies:
			return strings.TrimPrefix(name, policyKind), true, nil
		case r.itself:
			if w.here == 1 && !q.FromHere {
				continue
			}
			if is, err := q.isLocal(peer); is || err != nil {
				return "", false, err
			}
			continue
		case r.set != "" && !strings.HasSuffix(r.set, f.suffix):
			continue
		case r.set != "":
			key := string(peer.AsSlice())
			if r.set == trackedSet(f).name {
				key = kept
			}
			if in, err := q.element(r.set, key); in == nil || err != nil {
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
	set     string // that the peer has to be in
	itself  bool   // it asks whether the peer is an address of this node
	accepts bool   // it ends the packet's way through the table
}

func (s *socket) verdictRules(chain string) (out []readRule, err error) {
	err = s.dump(unix.NFT_MSG_GETRULE, PolicyTable, unix.NFTA_RULE_TABLE, func(m netlink.Message) {
		r, of := readRule{}, ""
		for typ, v := range attributes(m) {
			switch typ {
			case unix.NFTA_RULE_CHAIN:
				of = cString(v)
			case unix.NFTA_RULE_USERDATA:
				r.comment = udata(v).getString(udataRuleComment)
			case unix.NFTA_RULE_EXPRESSIONS:
				r.read(v)
			}
		}
		if of == chain {
			out = append(out, r)
		}
	})
	return out, err
}

func (r *readRule) read(exprs []byte) {
	for name, data := range expressions(exprs) {
		for typ, v := range nested(data) {
			switch {
			case name == "fib":
				r.itself = true
			case name == "lookup" && typ == unix.NFTA_LOOKUP_SET:
				r.set = cString(v)
			case name == "immediate" && typ == unix.NFTA_IMMEDIATE_DATA:
				for typ, v := range nested(v) {
					r.accepts = r.accepts || typ == unix.NFTA_DATA_VERDICT && verdictOf(v) == nfAccept
				}
			}
		}
	}
}

// expressions are those of a rule, by their kinds.
func expressions(list []byte) func(yield func(string, []byte) bool) {
	return func(yield func(string, []byte) bool) {
		for _, e := range nested(list) {
			name, data := "", []byte(nil)
			for typ, v := range nested(e) {
				switch typ {
				case unix.NFTA_EXPR_NAME:
					name = cString(v)
				case unix.NFTA_EXPR_DATA:
					data = v
				}
			}
			if !yield(name, data) {
				return
			}
		}
	}
}

func verdictOf(b []byte) int32 {
	for typ, v := range nested(b) {
		if typ == unix.NFTA_VERDICT_CODE {
			return int32(number(v))
		}
	}
	return unix.NFT_CONTINUE
}

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
	all := attrs{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0}
	err = q.each(unix.NFT_MSG_GETCHAIN, netlink.Dump, all, func(m netlink.Message) {
		img, table, used := &image{chains: map[string]*foundChain{}}, "", uint32(0)
		img.addChain(m)
		for typ, v := range attributes(m) {
			switch typ {
			case unix.NFTA_CHAIN_TABLE:
				table = cString(v)
			case unix.NFTA_CHAIN_USE:
				used = number(v)
			}
		}
		sees := m.Data[0] == unix.NFPROTO_INET || uint32(m.Data[0]) == familyOfAddr(q.Source.Addr()).proto
		for name, c := range img.chains {
			mayDrop := used > 0 || c.policy != nfAccept
			if sees && mayDrop && table != PolicyTable && c.hook.typ != "" && c.hook.num == own.num && c.hook.priority <= own.priority {
				before = append(before, table+"/"+name)
			}
		}
	})
	slices.Sort(before)
	return before, err
}
