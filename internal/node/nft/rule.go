package nft

import (
	"hash/fnv"
	"time"

	"golang.org/x/sys/unix"
)

// Reg is the first of 16 registers of 4 bytes each. Rules usually load there.
const Reg = unix.NFT_REG32_00

// Numbers that golang.org/x/sys/unix does not have: include/uapi/linux/netfilter/nf_tables.h,
// nf_conntrack_common.h and nf_nat.h.
const (
	CtStateInvalid   = 1       // NF_CT_STATE_INVALID_BIT
	CtStateRelated   = 1 << 2  // NF_CT_STATE_RELATED_BIT
	CtStatusExpected = 1 << 0  // IPS_EXPECTED
	CtStatusDNAT     = 1 << 5  // IPS_DST_NAT
	CtStatusHelper   = 1 << 13 // IPS_HELPER: a rule assigned a helper
	CtProtoDst       = 12      // NFT_CT_PROTO_DST
	DynsetDelete     = 2       // NFT_DYNSET_OP_DELETE; Linux 5.4

	natRangeFullyRandom   = 1 << 4 // NF_NAT_RANGE_PROTO_RANDOM_FULLY
	rtnLocal              = 2      // RTN_LOCAL
	socketKey, socketDreg = 1, 2   // NFTA_SOCKET_*
	socketWildcard        = 2      // NFT_SOCKET_WILDCARD; Linux 5.9
)

// Rule is one rule: expressions, evaluated in order. A rule ends at the first expression
// that does not match. Methods append an expression and return the rule. Registers are
// numbers from Reg on.
type Rule struct {
	Comment string
	exprs   attrs
}

// Sum identifies the rule. The kernel returns expressions in another encoding than they
// were written, so each rule carries the hash of what was written.
func (r *Rule) Sum() string {
	h := fnv.New64a()
	_, _ = h.Write(r.exprs)
	_, _ = h.Write([]byte(r.Comment))
	return string(h.Sum(nil))
}

func (r *Rule) userData() udata {
	var u udata
	u.str(udataComment, r.Comment)
	u.add(udataRuleSum, []byte(r.Sum()))
	return u
}

// add appends an expression; fill writes its attributes.
func (r *Rule) add(name string, fill func(a *attrs)) *Rule {
	a := &r.exprs
	elem := a.nest(unix.NFTA_LIST_ELEM)
	a.str(unix.NFTA_EXPR_NAME, name)
	data := a.nest(unix.NFTA_EXPR_DATA)
	fill(a)
	a.close(data)
	a.close(elem)
	return r
}

// Meta loads a property of the packet (unix.NFT_META_*).
func (r *Rule) Meta(key, reg uint32) *Rule {
	return r.add("meta", func(a *attrs) {
		a.u32(unix.NFTA_META_DREG, reg)
		a.u32(unix.NFTA_META_KEY, key)
	})
}

// SetMeta writes a property of the packet.
func (r *Rule) SetMeta(key, reg uint32) *Rule {
	return r.add("meta", func(a *attrs) {
		a.u32(unix.NFTA_META_KEY, key)
		a.u32(unix.NFTA_META_SREG, reg)
	})
}

// Payload loads bytes of a header (unix.NFT_PAYLOAD_*_HEADER).
func (r *Rule) Payload(base, offset, length, reg uint32) *Rule {
	return r.add("payload", func(a *attrs) {
		a.u32(unix.NFTA_PAYLOAD_DREG, reg)
		a.u32(unix.NFTA_PAYLOAD_BASE, base)
		a.u32(unix.NFTA_PAYLOAD_OFFSET, offset)
		a.u32(unix.NFTA_PAYLOAD_LEN, length)
	})
}

// End is one of the two ends of a packet.
type End int

// The ends of a packet.
const (
	Source End = iota
	Destination
)

// Addr loads an address of the packet.
func (r *Rule) Addr(f *IP, end End, reg uint32) *Rule {
	return r.Payload(unix.NFT_PAYLOAD_NETWORK_HEADER, [2]uint32{f.saddr, f.daddr}[end], f.Size, reg)
}

// Port loads a port of the packet.
func (r *Rule) Port(end End, reg uint32) *Rule {
	return r.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, uint32(2*end), 2, reg)
}

// Version matches packets of this version of IP. It uses register Reg.
func (r *Rule) Version(f *IP) *Rule {
	return r.Meta(unix.NFT_META_NFPROTO, Reg).Cmp(unix.NFT_CMP_EQ, Reg, []byte{byte(f.Family)})
}

// Protocol compares the protocol of the packet. It uses register Reg.
func (r *Rule) Protocol(op uint32, protocol byte) *Rule {
	return r.Meta(unix.NFT_META_L4PROTO, Reg).Cmp(op, Reg, []byte{protocol})
}

// Ct loads a property of the connection (unix.NFT_CT_*).
func (r *Rule) Ct(key, reg uint32) *Rule {
	return r.add("ct", func(a *attrs) {
		a.u32(unix.NFTA_CT_KEY, key)
		a.u32(unix.NFTA_CT_DREG, reg)
	})
}

// CtOriginal loads a field of the connection's original direction: what the client sent,
// before any translation.
func (r *Rule) CtOriginal(key, reg uint32) *Rule { return r.ctDirection(key, 0, reg) }

// CtReply loads a field of the connection's reply direction.
func (r *Rule) CtReply(key, reg uint32) *Rule { return r.ctDirection(key, 1, reg) }

func (r *Rule) ctDirection(key uint32, direction byte, reg uint32) *Rule {
	return r.add("ct", func(a *attrs) {
		a.u32(unix.NFTA_CT_KEY, key)
		a.u32(unix.NFTA_CT_DREG, reg)
		a.bytes(unix.NFTA_CT_DIRECTION, []byte{direction})
	})
}

// Cmp compares a register (unix.NFT_CMP_*).
func (r *Rule) Cmp(op, reg uint32, value []byte) *Rule {
	return r.add("cmp", func(a *attrs) {
		a.u32(unix.NFTA_CMP_SREG, reg)
		a.u32(unix.NFTA_CMP_OP, op)
		a.data(unix.NFTA_CMP_DATA, string(value))
	})
}

// Between matches values from first to last.
func (r *Rule) Between(reg uint32, first, last []byte) *Rule {
	return r.add("range", func(a *attrs) {
		a.u32(unix.NFTA_RANGE_SREG, reg)
		a.u32(unix.NFTA_RANGE_OP, unix.NFT_RANGE_EQ)
		a.data(unix.NFTA_RANGE_FROM_DATA, string(first))
		a.data(unix.NFTA_RANGE_TO_DATA, string(last))
	})
}

// And clears all other bits of a register.
func (r *Rule) And(reg uint32, mask []byte) *Rule {
	return r.add("bitwise", func(a *attrs) {
		a.u32(unix.NFTA_BITWISE_SREG, reg)
		a.u32(unix.NFTA_BITWISE_DREG, reg)
		a.u32(unix.NFTA_BITWISE_LEN, uint32(len(mask)))
		a.data(unix.NFTA_BITWISE_MASK, string(mask))
		a.data(unix.NFTA_BITWISE_XOR, string(make([]byte, len(mask))))
	})
}

// AnyBit matches if one of the bits is set.
func (r *Rule) AnyBit(reg, bits uint32) *Rule {
	return r.And(reg, hostU32(bits)).Cmp(unix.NFT_CMP_NEQ, reg, hostU32(0))
}

// NoBit matches if none of the bits is set.
func (r *Rule) NoBit(reg, bits uint32) *Rule {
	return r.And(reg, hostU32(bits)).Cmp(unix.NFT_CMP_EQ, reg, hostU32(0))
}

// Device compares the number of the device by which the packet came; 0: none. It uses
// register Reg.
func (r *Rule) Device(op, number uint32) *Rule {
	return r.Meta(unix.NFT_META_IIF, Reg).Cmp(op, Reg, hostU32(number))
}

// OutputDevice compares the number of the device by which the packet leaves. It uses register
// Reg.
func (r *Rule) OutputDevice(op, number uint32) *Rule {
	return r.Meta(unix.NFT_META_OIF, Reg).Cmp(op, Reg, hostU32(number))
}

// Local compares whether an address of the packet belongs to the node: unix.NFT_CMP_EQ
// matches if it does. It uses register Reg.
func (r *Rule) Local(end End, op uint32) *Rule {
	r.add("fib", func(a *attrs) {
		a.u32(unix.NFTA_FIB_DREG, Reg)
		a.u32(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
		a.u32(unix.NFTA_FIB_FLAGS, [2]uint32{unix.NFTA_FIB_F_SADDR, unix.NFTA_FIB_F_DADDR}[end])
	})
	return r.Cmp(op, Reg, hostU32(rtnLocal))
}

// Socket matches if the node has a socket for the packet as it is, including sockets that
// listen on all addresses. Before translation it finds the socket of the untranslated
// destination. In the output hook it finds the sender's.
func (r *Rule) Socket(reg uint32) *Rule {
	return r.add("socket", func(a *attrs) {
		a.u32(socketKey, socketWildcard)
		a.u32(socketDreg, reg)
	}).Cmp(unix.NFT_CMP_LTE, reg, []byte{1}) // always true: without a socket the rule has ended
}

// Random loads a random number below modulus.
func (r *Rule) Random(modulus, reg uint32) *Rule {
	return r.add("numgen", func(a *attrs) {
		a.u32(unix.NFTA_NG_DREG, reg)
		a.u32(unix.NFTA_NG_MODULUS, modulus)
		a.u32(unix.NFTA_NG_TYPE, unix.NFT_NG_RANDOM)
		a.u32(unix.NFTA_NG_OFFSET, 0)
	})
}

// Hash loads the Hash of count registers, from reg on, into reg.
func (r *Rule) Hash(reg, count uint32) *Rule {
	return r.add("hash", func(a *attrs) {
		a.u32(unix.NFTA_HASH_SREG, reg)
		a.u32(unix.NFTA_HASH_DREG, reg)
		a.u32(unix.NFTA_HASH_LEN, 4*count)
		a.u32(unix.NFTA_HASH_MODULUS, hashModulus)
		a.u32(unix.NFTA_HASH_SEED, hashSeed)
		a.u32(unix.NFTA_HASH_OFFSET, hashOffset)
	})
}

// In matches if the set has the key at reg.
func (r *Rule) In(set string, reg uint32) *Rule { return r.lookup(set, reg, nil) }

// NotIn matches if the set does not have the key at reg.
func (r *Rule) NotIn(set string, reg uint32) *Rule {
	return r.lookup(set, reg, func(a *attrs) { a.u32(unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV) })
}

// Map replaces the key at reg by its data. It matches if the map has the key.
func (r *Rule) Map(name string, reg uint32) *Rule {
	return r.lookup(name, reg, func(a *attrs) { a.u32(unix.NFTA_LOOKUP_DREG, reg) })
}

// JumpMap jumps to the chain of the key at reg, if the map has the key.
func (r *Rule) JumpMap(name string, reg uint32) *Rule {
	return r.lookup(name, reg, func(a *attrs) { a.u32(unix.NFTA_LOOKUP_DREG, unix.NFT_REG_VERDICT) })
}

func (r *Rule) lookup(set string, reg uint32, more func(*attrs)) *Rule {
	return r.add("lookup", func(a *attrs) {
		a.str(unix.NFTA_LOOKUP_SET, set)
		a.u32(unix.NFTA_LOOKUP_SREG, reg)
		if more != nil {
			more(a)
		}
	})
}

// Dynset changes a set that packets fill, or, with a register of data, a map
// (unix.NFT_DYNSET_OP_*, DynsetDelete). No operation overwrites an existing element; an
// update restarts its timeout (net/netfilter/nft_dynset.c). Timeout 0: none.
func (r *Rule) Dynset(op uint32, set string, key, data uint32, timeout time.Duration) *Rule {
	return r.add("dynset", func(a *attrs) {
		a.u32(unix.NFTA_DYNSET_SREG_KEY, key)
		if data != 0 {
			a.u32(unix.NFTA_DYNSET_SREG_DATA, data)
		}
		a.u32(unix.NFTA_DYNSET_OP, op)
		if timeout > 0 {
			a.u64(unix.NFTA_DYNSET_TIMEOUT, uint64(timeout.Milliseconds()))
		}
		a.str(unix.NFTA_DYNSET_SET_NAME, set)
	})
}

// Load puts a number into a register, in host byte order.
func (r *Rule) Load(reg, number uint32) *Rule {
	return r.add("immediate", func(a *attrs) {
		a.u32(unix.NFTA_IMMEDIATE_DREG, reg)
		a.data(unix.NFTA_IMMEDIATE_DATA, string(hostU32(number)))
	})
}

// Verdict ends the rule with a verdict (unix.NFT_*, or netfilter's).
func (r *Rule) Verdict(code int32, chain string) *Rule {
	return r.add("immediate", func(a *attrs) {
		a.u32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		a.verdict(unix.NFTA_IMMEDIATE_DATA, code, chain)
	})
}

// Goto continues in another chain and does not return.
func (r *Rule) Goto(chain string) *Rule { return r.Verdict(unix.NFT_GOTO, chain) }

// Jump continues in another chain and returns.
func (r *Rule) Jump(chain string) *Rule { return r.Verdict(unix.NFT_JUMP, chain) }

// Return ends the chain.
func (r *Rule) Return() *Rule { return r.Verdict(unix.NFT_RETURN, "") }

// Drop drops the packet.
func (r *Rule) Drop() *Rule { return r.Verdict(0, "") }

// Accept ends the base chain; base chains with later priorities still see the packet.
func (r *Rule) Accept() *Rule { return r.Verdict(policyAccept, "") }

// Counter counts packets and bytes.
func (r *Rule) Counter() *Rule { return r.add("counter", func(*attrs) {}) }

// Notrack leaves the packet untracked by conntrack.
func (r *Rule) Notrack() *Rule { return r.add("notrack", func(*attrs) {}) }

// Helper assigns the connection a conntrack helper, an object of the table.
func (r *Rule) Helper(name string) *Rule {
	return r.add("objref", func(a *attrs) {
		a.u32(unix.NFTA_OBJREF_IMM_TYPE, unix.NFT_OBJECT_CT_HELPER)
		a.str(unix.NFTA_OBJREF_IMM_NAME, name)
	})
}

// DNAT translates to the address at Reg and the port in the register after it.
func (r *Rule) DNAT(f *IP) *Rule {
	return r.add("nat", func(a *attrs) {
		a.u32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
		a.u32(unix.NFTA_NAT_FAMILY, uint32(f.Family))
		a.u32(unix.NFTA_NAT_REG_ADDR_MIN, Reg)
		a.u32(unix.NFTA_NAT_REG_PROTO_MIN, Reg+f.Regs())
	})
}

// SNAT gives the packet the source address at Reg.
func (r *Rule) SNAT(f *IP) *Rule {
	return r.add("nat", func(a *attrs) {
		a.u32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
		a.u32(unix.NFTA_NAT_FAMILY, uint32(f.Family))
		a.u32(unix.NFTA_NAT_REG_ADDR_MIN, Reg)
	})
}

// SNATFullyRandom gives the packet the source address at Reg and a fully random port: see Masquerade.
func (r *Rule) SNATFullyRandom(f *IP) *Rule {
	return r.add("nat", func(a *attrs) {
		a.u32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
		a.u32(unix.NFTA_NAT_FAMILY, uint32(f.Family))
		a.u32(unix.NFTA_NAT_REG_ADDR_MIN, Reg)
		a.u32(unix.NFTA_NAT_FLAGS, natRangeFullyRandom)
	})
}

// Masquerade gives the packet the node's address and a fully random port. If the kernel
// counted ports up, two connections that begin at once could get the same port; one of
// them would be lost (insert_failed).
func (r *Rule) Masquerade() *Rule {
	return r.add("masq", func(a *attrs) { a.u32(unix.NFTA_MASQ_FLAGS, natRangeFullyRandom) })
}

// Reject drops the packet and answers it (unix.NFT_REJECT_*).
func (r *Rule) Reject(typ uint32, code byte) *Rule {
	return r.add("reject", func(a *attrs) {
		a.u32(unix.NFTA_REJECT_TYPE, typ)
		a.bytes(unix.NFTA_REJECT_ICMP_CODE, []byte{code})
	})
}
