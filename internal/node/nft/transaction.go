package nft

import (
	"iter"
	"maps"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Transaction is a list of changes of one table. The methods may be called in any order:
// the changes are made in the order of their kinds, so that an object exists while others
// refer to it. Commit makes all changes or none.
type Transaction struct {
	table Table
	kinds [kindCount][]netlink.Message
	count int
	size  int // bytes
}

// The kinds of changes, in order.
const (
	kindTable = iota // adds, and replaces
	kindAddSet
	kindAddHelper
	kindAddChain
	kindDeleteElements
	kindAddElements
	kindFlushChain
	kindAddRules
	kindDeleteSet // before chains that its elements jump to
	kindDeleteChain
	kindDeleteHelper
	kindDeleteTable
	kindCount
)

// NewTransaction returns an empty transaction for a table.
func NewTransaction(t Table) *Transaction { return &Transaction{table: t} }

// Empty reports whether there is no change.
func (t *Transaction) Empty() bool { return t.count == 0 }

// Size returns the bytes of all changes.
func (t *Transaction) Size() int { return t.size }

// messages returns the changes in order.
func (t *Transaction) messages() []netlink.Message { return slices.Concat(t.kinds[:]...) }

// partSize bounds the size of a part, in bytes. The kernel keeps some hundred bytes for
// each element until the batch ends, and 4 KiB if any program in any namespace listens to
// nf_tables: a notification (nf_tables_setelem_notify). 50,000 Services in one batch made
// that 2 GiB.
const partSize = 1 << 20

// Parts splits the transaction of a table that does not exist yet. The parts have to be
// committed in order. All rules are in the last part, so no part before it has an effect
// on packets.
func (t *Transaction) Parts() (out []*Transaction) {
	part := NewTransaction(t.table)
	for kind, msgs := range t.kinds {
		for _, m := range msgs {
			if kind < kindFlushChain && part.size >= partSize {
				out, part = append(out, part), NewTransaction(t.table)
			}
			part.append(kind, m)
		}
	}
	return append(out, part)
}

func (t *Transaction) append(kind int, m netlink.Message) {
	t.kinds[kind] = append(t.kinds[kind], m)
	t.count++
	t.size += unix.NLMSG_HDRLEN + len(m.Data)
}

// message appends a message about an object of the table; fill, if not nil, writes further
// attributes. nameAttr is the type of the attribute with the object's name.
func (t *Transaction) message(kind, typ int, flags netlink.HeaderFlags, nameAttr uint16, name string, fill func(a *attrs)) {
	a := t.header(nameAttr, name)
	if fill != nil {
		fill(&a)
	}
	t.append(kind, netlink.Message{Header: messageHeader(typ, flags), Data: a})
}

func (t *Transaction) header(nameAttr uint16, name string) attrs {
	a := header(t.table.Family)
	a.str(attrTable, t.table.Name)
	if name != "" {
		a.str(nameAttr, name)
	}
	return a
}

// attrTable is the type of the attribute with the table's name: NFTA_TABLE_NAME,
// NFTA_CHAIN_TABLE, NFTA_RULE_TABLE and so on.
const attrTable = 1

func messageHeader(typ int, flags netlink.HeaderFlags) netlink.Header {
	return netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ), Flags: netlink.Request | flags}
}

// AddTable adds the table unless it exists.
func (t *Transaction) AddTable() {
	t.message(kindTable, unix.NFT_MSG_NEWTABLE, netlink.Create, 0, "", func(a *attrs) {
		a.u32(unix.NFTA_TABLE_FLAGS, t.table.Flags)
		a.comment(tableUserData, t.table.Comment)
	})
}

// ReplaceTable deletes the table, if it exists, and adds it empty.
func (t *Transaction) ReplaceTable() {
	t.AddTable() // the kernel refuses to delete a table that does not exist
	t.deleteTable(kindTable)
	t.AddTable()
}

// DeleteTable deletes the table.
func (t *Transaction) DeleteTable() { t.deleteTable(kindDeleteTable) }

func (t *Transaction) deleteTable(kind int) {
	t.message(kind, unix.NFT_MSG_DELTABLE, 0, 0, "", nil)
}

// AddSet adds a set or map, or does nothing if an equal one exists.
func (t *Transaction) AddSet(s *Set) {
	t.message(kindAddSet, unix.NFT_MSG_NEWSET, netlink.Create, unix.NFTA_SET_NAME, s.Name, func(a *attrs) {
		a.u32(unix.NFTA_SET_FLAGS, s.flags())
		a.u32(unix.NFTA_SET_KEY_TYPE, typeOf(s.Key))
		a.u32(unix.NFTA_SET_KEY_LEN, Len(s.Key))
		if s.Verdict {
			a.u32(unix.NFTA_SET_DATA_TYPE, dataVerdict)
		} else if len(s.Data) > 0 {
			a.u32(unix.NFTA_SET_DATA_TYPE, typeOf(s.Data))
			a.u32(unix.NFTA_SET_DATA_LEN, Len(s.Data))
		}
		a.u32(unix.NFTA_SET_ID, uint32(t.count+1))
		if s.flags()&setConcat != 0 {
			desc := a.nest(unix.NFTA_SET_DESC)
			concat := a.nest(setDescConcat)
			for _, f := range s.Key {
				elem := a.nest(unix.NFTA_LIST_ELEM)
				a.u32(setFieldLen, f.Size)
				a.close(elem)
			}
			a.close(concat)
			a.close(desc)
		}
		if s.Dynamic() {
			desc := a.nest(unix.NFTA_SET_DESC)
			a.u32(unix.NFTA_SET_DESC_SIZE, s.Size)
			a.close(desc)
		}
		a.bytes(unix.NFTA_SET_USERDATA, s.userData())
		if s.Counted {
			expr := a.nest(setExpr)
			a.str(unix.NFTA_EXPR_NAME, "counter")
			a.close(a.nest(unix.NFTA_EXPR_DATA))
			a.close(expr)
		}
	})
}

// DeleteSet deletes a set with its elements.
func (t *Transaction) DeleteSet(name string) {
	t.message(kindDeleteSet, unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, name, nil)
}

// FlushSet deletes all elements of a set.
func (t *Transaction) FlushSet(name string) {
	t.message(kindDeleteElements, unix.NFT_MSG_DELSETELEM, 0, unix.NFTA_SET_ELEM_LIST_SET, name, nil)
}

// AddElements adds elements to a set. The kernel refuses an element that exists with
// another value.
func (t *Transaction) AddElements(set string, elements iter.Seq2[string, *Value]) {
	t.elements(kindAddElements, unix.NFT_MSG_NEWSETELEM, netlink.Create, set, elements, (*attrs).value)
}

// DeleteElements deletes elements of a set. Of a value only KeyEnd and IntervalEnd count.
func (t *Transaction) DeleteElements(set string, elements iter.Seq2[string, *Value]) {
	t.elements(kindDeleteElements, unix.NFT_MSG_DELSETELEM, 0, set, elements, nil)
}

// listLimit bounds a list of elements: the length of an attribute has 16 bits, and an
// element is far smaller than the rest.
const listLimit = 60_000

func (t *Transaction) elements(kind, typ int, flags netlink.HeaderFlags, set string, elements iter.Seq2[string, *Value],
	value func(*attrs, *Value)) {
	var a attrs // message under construction
	list := 0
	end := func() {
		if a != nil {
			a.close(list)
			t.append(kind, netlink.Message{Header: messageHeader(typ, flags), Data: a})
			a = nil
		}
	}
	for key, v := range elements {
		if len(a) >= listLimit {
			end()
		}
		if a == nil {
			a = t.header(unix.NFTA_SET_ELEM_LIST_SET, set)
			list = a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		}
		at := a.nest(unix.NFTA_LIST_ELEM)
		a.key(key, v)
		if value != nil {
			value(&a, v)
		}
		a.close(at)
	}
	end()
}

func (a *attrs) key(key string, v *Value) {
	a.data(unix.NFTA_SET_ELEM_KEY, key)
	if v.KeyEnd != "" {
		a.data(setElemKeyEnd, v.KeyEnd)
	}
	if v.IntervalEnd {
		a.u32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
}

func (a *attrs) value(v *Value) {
	if v.Timeout > 0 {
		a.u64(unix.NFTA_SET_ELEM_TIMEOUT, uint64(v.Timeout.Milliseconds()))
	}
	if v.Data != "" {
		a.data(unix.NFTA_SET_ELEM_DATA, v.Data)
	}
	if v.Jump != "" {
		a.verdict(unix.NFTA_SET_ELEM_DATA, unix.NFT_JUMP, v.Jump)
	}
	a.comment(unix.NFTA_SET_ELEM_USERDATA, v.Comment)
}

// Chains replaces chains: had maps the names of existing chains to their Chain.Sums.
// Chains with equal rules stay; those that are not wanted are deleted.
func (t *Transaction) Chains(had map[string]string, want []*Chain) {
	gone := maps.Clone(had)
	for _, c := range want {
		sums, exists := had[c.Name]
		delete(gone, c.Name)
		switch {
		case !exists:
			t.AddChain(c)
		case sums != c.Sums():
			t.FlushChain(c.Name)
			t.addRules(c)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(gone)) {
		t.FlushChain(name)
		t.message(kindDeleteChain, unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name, nil)
	}
}

// AddChain adds a chain, unless it exists, and its rules.
func (t *Transaction) AddChain(c *Chain) {
	t.message(kindAddChain, unix.NFT_MSG_NEWCHAIN, netlink.Create, unix.NFTA_CHAIN_NAME, c.Name, func(a *attrs) {
		if c.Hook != nil {
			at := a.nest(unix.NFTA_CHAIN_HOOK)
			a.u32(unix.NFTA_HOOK_HOOKNUM, c.Hook.Num)
			a.u32(unix.NFTA_HOOK_PRIORITY, uint32(c.Hook.Priority))
			a.close(at)
			a.str(unix.NFTA_CHAIN_TYPE, c.Hook.Type)
			a.u32(unix.NFTA_CHAIN_POLICY, policyAccept)
		}
		a.comment(chainUserData, c.Comment)
	})
	t.addRules(c)
}

// FlushChain deletes all rules of a chain.
func (t *Transaction) FlushChain(name string) {
	t.message(kindFlushChain, unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, name, nil)
}

// addRules appends the rules of a chain to it.
func (t *Transaction) addRules(c *Chain) {
	for _, r := range c.Rules {
		t.message(kindAddRules, unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, unix.NFTA_RULE_CHAIN, c.Name, func(a *attrs) {
			a.bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.exprs)
			a.bytes(unix.NFTA_RULE_USERDATA, r.userData())
		})
	}
}

// AddHelper adds a conntrack helper.
func (t *Transaction) AddHelper(h Helper) {
	t.message(kindAddHelper, unix.NFT_MSG_NEWOBJ, netlink.Create, unix.NFTA_OBJ_NAME, h.Name, func(a *attrs) {
		a.u32(unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_CT_HELPER)
		at := a.nest(unix.NFTA_OBJ_DATA)
		a.str(unix.NFTA_CT_HELPER_NAME, h.Name)
		a.bytes(unix.NFTA_CT_HELPER_L4PROTO, []byte{h.Protocol})
		a.close(at)
	})
}

// DeleteHelper deletes a conntrack helper.
func (t *Transaction) DeleteHelper(name string) {
	t.message(kindDeleteHelper, unix.NFT_MSG_DELOBJ, 0, unix.NFTA_OBJ_NAME, name, func(a *attrs) {
		a.u32(unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_CT_HELPER)
	})
}
