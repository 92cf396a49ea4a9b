package nft

import (
	"context"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Listing is the content of a table. A table that does not exist has no sets, chains and
// helpers.
type Listing struct {
	Generation uint32 // of nf_tables when the table was read
	Exists     bool
	Table      Table
	Sets       map[string]*ListedSet
	Chains     map[string]*ListedChain
	Helpers    map[string]bool
}

// Active reports whether the table exists and its hooks are enabled.
func (l *Listing) Active() bool { return l.Exists && !l.Table.Dormant() }

// ListedSet is a set of the kernel.
type ListedSet struct {
	Flags           uint32            // unix.NFT_SET_*
	KeyLen, DataLen uint32            // bytes in registers
	Counted         bool              // each element counts packets
	Elements        map[string]*Value // without those that packets added
}

// Is reports whether the set has the type of s.
func (l *ListedSet) Is(s *Set) bool {
	const compared = unix.NFT_SET_MAP | unix.NFT_SET_INTERVAL | setConcat | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | unix.NFT_SET_CONSTANT
	return l.Flags&compared == s.flags() && l.Counted == s.Counted && l.KeyLen == Len(s.Key) &&
		(s.Verdict || l.DataLen == Len(s.Data))
}

// ListedChain is a chain of the kernel.
type ListedChain struct {
	Table Table
	Name  string
	Hook  Hook   // zero: not a base chain
	Sums  string // see Chain.Sums; of Listing only
	// MayDrop reports whether the chain has a rule, or a policy other than accept.
	MayDrop bool

	policy uint32
}

// Is reports whether the chain is a base chain of this hook with policy accept, or, if hook
// is nil, no base chain.
func (l *ListedChain) Is(hook *Hook) bool {
	if hook == nil {
		return l.Hook == Hook{}
	}
	return l.Hook == *hook && l.policy == policyAccept
}

// snapshotTries bounds how often Read reads a table again because another program changed
// it meanwhile.
const snapshotTries = 3

// Read reads a table, with or without elements. If other programs change their tables all
// the time, the result of the last try counts, whose Generation has passed.
func (c *Conn) Read(ctx context.Context, t Table, elements bool) (l *Listing, err error) {
	err = c.do(ctx, func() error {
		for range snapshotTries {
			before, err := c.readGeneration()
			if err != nil {
				return err
			}
			if l, err = c.readOnce(t, elements); err != nil {
				return fmt.Errorf("read table %s: %w", t.Name, err)
			}
			l.Generation = before
			if after, err := c.readGeneration(); err != nil || after == before {
				return err
			}
		}
		return nil
	})
	return l, err
}

func (c *Conn) readOnce(t Table, elements bool) (*Listing, error) {
	l := &Listing{Table: t, Sets: map[string]*ListedSet{}, Chains: map[string]*ListedChain{}, Helpers: map[string]bool{}}
	tables, err := c.tables()
	for _, found := range tables {
		if found.Same(t) {
			l.Exists, l.Table = true, found
		}
	}
	if err != nil || !l.Exists {
		return l, err
	}
	for _, d := range []struct {
		typ int
		add func(netlink.Message)
	}{
		{unix.NFT_MSG_GETSET, l.addSet}, {unix.NFT_MSG_GETCHAIN, l.addChain},
		{unix.NFT_MSG_GETRULE, l.addRule}, {unix.NFT_MSG_GETOBJ, l.addObject},
	} {
		if err := c.dump(d.typ, t, d.add); err != nil {
			return nil, err
		}
	}
	for name, s := range l.Sets {
		if !elements || s.Flags&unix.NFT_SET_EVAL != 0 {
			continue // packets change it
		}
		if s.Elements, err = c.elements(t, name); err != nil {
			return nil, fmt.Errorf("read elements of set %s: %w", name, err)
		}
	}
	return l, nil
}

// dump calls add with the objects of a kind in a table, or, if t is zero, in all tables. A
// kernel without nf_tables has none.
func (c *Conn) dump(typ int, t Table, add func(netlink.Message)) error {
	a := header(t.Family)
	if t.Name != "" {
		a.str(attrTable, t.Name)
	}
	err := c.request(typ, netlink.Dump, a, func(m netlink.Message) {
		// Older kernels do not filter all kinds by table.
		if t.Name == "" || tableOf(m.Data).Name == t.Name {
			add(m)
		}
	})
	if missing(err) {
		return nil
	}
	return err
}

// tableOf returns the family and the name of an object's table.
func tableOf(object []byte) (t Table) {
	if len(object) >= 4 {
		t.Family = Family(object[0])
	}
	t.Name = String(Attribute(payload(object), attrTable))
	return t
}

// Tables lists the tables of all families.
func (c *Conn) Tables(ctx context.Context) (list []Table, err error) {
	err = c.list(ctx, "tables", func() error { list, err = c.tables(); return err })
	return list, err
}

// list runs f, which lists objects. A kernel without nf_tables has none.
func (c *Conn) list(ctx context.Context, what string, f func() error) error {
	err := c.do(ctx, f)
	if errors.Is(err, unix.EPROTONOSUPPORT) { // no netlink socket
		return nil
	}
	if err != nil {
		return fmt.Errorf("list %s of nf_tables: %w", what, err)
	}
	return nil
}

func (c *Conn) tables() (list []Table, err error) {
	err = c.dump(unix.NFT_MSG_GETTABLE, Table{}, func(m netlink.Message) {
		t := tableOf(m.Data)
		t.Flags = Number(Attribute(payload(m.Data), unix.NFTA_TABLE_FLAGS))
		list = append(list, t)
	})
	return list, err
}

// Chains lists the chains of all tables.
func (c *Conn) Chains(ctx context.Context) (list []*ListedChain, err error) {
	err = c.list(ctx, "chains", func() error {
		return c.dump(unix.NFT_MSG_GETCHAIN, Table{}, func(m netlink.Message) { list = append(list, readChain(m)) })
	})
	return list, err
}

// ListedRule is a rule of the kernel.
type ListedRule struct {
	Table       Table
	Chain       string
	Handle      uint64 // no other rule of the table ever has it
	Comment     string
	Sum         string // Rule.Sum, if this package wrote the rule
	Expressions []byte // see Expressions
}

// Rules calls f with each rule of a table, or, if t is zero, of all tables, until f returns
// false. interrupted reports that rules changed meanwhile, so that some may be missing.
func (c *Conn) Rules(ctx context.Context, t Table, f func(ListedRule) bool) (interrupted bool, err error) {
	stopped := false
	err = c.list(ctx, "rules", func() error {
		err := c.dump(unix.NFT_MSG_GETRULE, t, func(m netlink.Message) {
			interrupted = interrupted || m.Header.Flags&netlink.DumpInterrupted != 0
			if !stopped && !f(ReadRule(m.Data)) {
				stopped = true
				c.reset() // ends the dump, with an error
			}
		})
		if stopped {
			return nil
		}
		return err
	})
	return interrupted, err
}

// ReadRule decodes the payload of an NFT_MSG_NEWRULE message.
func ReadRule(object []byte) ListedRule {
	r := ListedRule{Table: tableOf(object)}
	for typ, v := range Attributes(payload(object)) {
		switch typ {
		case unix.NFTA_RULE_CHAIN:
			r.Chain = String(v)
		case unix.NFTA_RULE_HANDLE:
			r.Handle = number64(v)
		case unix.NFTA_RULE_USERDATA:
			r.Comment, r.Sum = udata(v).comment(), string(udata(v).get(udataRuleSum))
		case unix.NFTA_RULE_EXPRESSIONS:
			r.Expressions = v
		}
	}
	return r
}

// Packets returns the packets that the rule's counter has counted.
func (r *ListedRule) Packets() (packets uint64) {
	for name, data := range Expressions(r.Expressions) {
		if name == "counter" {
			packets = number64(Attribute(data, unix.NFTA_COUNTER_PACKETS))
		}
	}
	return packets
}

func (l *Listing) addSet(m netlink.Message) {
	s, name := &ListedSet{}, ""
	for typ, v := range Attributes(payload(m.Data)) {
		switch typ {
		case unix.NFTA_SET_NAME:
			name = String(v)
		case unix.NFTA_SET_FLAGS:
			s.Flags = Number(v)
		case unix.NFTA_SET_KEY_LEN:
			s.KeyLen = Number(v)
		case unix.NFTA_SET_DATA_LEN:
			s.DataLen = Number(v)
		case setExpr:
			s.Counted = true
		}
	}
	l.Sets[name] = s
}

func (l *Listing) addChain(m netlink.Message) {
	c := readChain(m)
	l.Chains[c.Name] = c
}

func readChain(m netlink.Message) *ListedChain {
	c, rules := &ListedChain{Table: tableOf(m.Data)}, uint32(0)
	for typ, v := range Attributes(payload(m.Data)) {
		switch typ {
		case unix.NFTA_CHAIN_NAME:
			c.Name = String(v)
		case unix.NFTA_CHAIN_TYPE:
			c.Hook.Type = String(v)
		case unix.NFTA_CHAIN_POLICY:
			c.policy = Number(v)
		case unix.NFTA_CHAIN_USE:
			rules = Number(v)
		case unix.NFTA_CHAIN_HOOK:
			c.Hook.Num = Number(Attribute(v, unix.NFTA_HOOK_HOOKNUM))
			c.Hook.Priority = int32(Number(Attribute(v, unix.NFTA_HOOK_PRIORITY)))
		}
	}
	c.MayDrop = rules > 0 || c.policy != policyAccept
	return c
}

// addRule appends the rule's sum to its chain's; a rule of another program has a sum of its
// own.
func (l *Listing) addRule(m netlink.Message) {
	r := ReadRule(m.Data)
	if c := l.Chains[r.Chain]; c != nil {
		if r.Sum == "" {
			r.Sum = "foreign"
		}
		c.Sums += r.Sum
	}
}

func (l *Listing) addObject(m netlink.Message) {
	if a := payload(m.Data); Number(Attribute(a, unix.NFTA_OBJ_TYPE)) == unix.NFT_OBJECT_CT_HELPER {
		l.Helpers[String(Attribute(a, unix.NFTA_OBJ_NAME))] = true
	}
}

// Sums maps the chains to their Sums.
func (l *Listing) Sums() map[string]string {
	out := map[string]string{}
	for name, c := range l.Chains {
		out[name] = c.Sums
	}
	return out
}

// Elements lists the elements of a set; nil: there is no such set.
func (c *Conn) Elements(ctx context.Context, t Table, set string) (elements map[string]*Value, err error) {
	err = c.do(ctx, func() error {
		elements, err = c.elements(t, set)
		if errors.Is(err, unix.ENOENT) {
			elements, err = nil, nil
		}
		return err
	})
	return elements, err
}

func (c *Conn) elements(t Table, set string) (map[string]*Value, error) {
	a := header(t.Family)
	a.str(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
	a.str(unix.NFTA_SET_ELEM_LIST_SET, set)
	return c.getElements(netlink.Dump, a)
}

// Element returns the element of a set that contains the key; nil: none, or no such set.
func (c *Conn) Element(ctx context.Context, t Table, set, key string) (value *Value, err error) {
	a := header(t.Family)
	a.str(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
	a.str(unix.NFTA_SET_ELEM_LIST_SET, set)
	list := a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	at := a.nest(unix.NFTA_LIST_ELEM)
	a.key(key, &Value{})
	a.close(at)
	a.close(list)
	err = c.do(ctx, func() error {
		found, err := c.getElements(0, a)
		for _, v := range found {
			value = v
		}
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	})
	return value, err
}

func (c *Conn) getElements(flags netlink.HeaderFlags, request attrs) (map[string]*Value, error) {
	out := map[string]*Value{}
	err := c.request(unix.NFT_MSG_GETSETELEM, flags, request, func(m netlink.Message) {
		for _, e := range Attributes(Attribute(payload(m.Data), unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			key, v := readElement(e)
			out[key] = v
		}
	})
	return out, err
}

// Packets returns what the elements of a set have counted; nil: there is no such set.
func (c *Conn) Packets(ctx context.Context, t Table, set string) (packets map[string]uint64, err error) {
	a := header(t.Family)
	a.str(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
	a.str(unix.NFTA_SET_ELEM_LIST_SET, set)
	err = c.do(ctx, func() error {
		packets = map[string]uint64{}
		err := c.request(unix.NFT_MSG_GETSETELEM, netlink.Dump, a, func(m netlink.Message) {
			for _, e := range Attributes(Attribute(payload(m.Data), unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
				key := string(Attribute(Attribute(e, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE))
				counter := Attribute(Attribute(e, unix.NFTA_SET_ELEM_EXPR), unix.NFTA_EXPR_DATA)
				packets[key] = number64(Attribute(counter, unix.NFTA_COUNTER_PACKETS))
			}
		})
		if errors.Is(err, unix.ENOENT) {
			packets = nil
			return nil
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read counters of set %s: %w", set, err)
	}
	return packets, nil
}

func readElement(e []byte) (key string, out *Value) {
	out = &Value{}
	for typ, v := range Attributes(e) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			key = string(Attribute(v, unix.NFTA_DATA_VALUE))
		case setElemKeyEnd:
			out.KeyEnd = string(Attribute(v, unix.NFTA_DATA_VALUE))
		case unix.NFTA_SET_ELEM_FLAGS:
			out.IntervalEnd = Number(v)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA:
			out.Data = string(Attribute(v, unix.NFTA_DATA_VALUE))
			out.Jump = String(Attribute(Attribute(v, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CHAIN))
		case unix.NFTA_SET_ELEM_USERDATA:
			out.Comment = udata(v).comment()
		}
	}
	return key, out
}
