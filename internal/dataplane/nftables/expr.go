package nftables

import (
	"hash/fnv"
	"time"

	"golang.org/x/sys/unix"
)

// firstReg is where a rule puts what it loads: the first of 16 registers of 4
// bytes each.
const firstReg = unix.NFT_REG32_00

// Numbers that golang.org/x/sys/unix does not have: include/uapi/linux/netfilter/nf_tables.h
// and nf_conntrack_common.h.
const (
	ctSrcIP, ctDstIP, ctSrcIP6, ctDstIP6 = 19, 20, 21, 22
	ctProtoDst                           = 12
	ctStateInvalid                       = 1
	ctStatusDNAT                         = 1 << 5
	natRangeFullyRandom                  = 1 << 4
	rtnLocal                             = 2

	socketKey, socketDreg = 1, 2 // NFTA_SOCKET_*
	socketWildcard        = 2    // NFT_SOCKET_WILDCARD; Linux 5.9
)

// rule is one rule of a chain: its expressions as the kernel takes them.
type rule struct {
	exprs   attrs
	comment string
	sum     string     // of rules that were read: what they are known by
	counts  counterKey // what its counter is about, in the table of policies
}

// Types of a rule's user data. The kernel returns expressions in words of its
// own, so a rule is known again by a sum of what was written. nft does not show
// types that it does not know.
const (
	udataRuleComment byte = 0
	udataRuleSum     byte = 250
)

// userData is what is stored beside the rule.
func (r *rule) userData() udata {
	var u udata
	if r.comment != "" {
		u.str(udataRuleComment, r.comment)
	}
	h := fnv.New64a()
	_, _ = h.Write(r.exprs)
	_, _ = h.Write([]byte(r.comment))
	u.add(udataRuleSum, h.Sum(nil))
	return u
}

// add appends an expression; fill writes its attributes.
func (r *rule) add(name string, fill func(a *attrs)) *rule {
	a := &r.exprs
	elem := a.nest(unix.NFTA_LIST_ELEM)
	a.str(unix.NFTA_EXPR_NAME, name)
	data := a.nest(unix.NFTA_EXPR_DATA)
	fill(a)
	a.close(data)
	a.close(elem)
	return r
}

func (r *rule) meta(key, reg uint32) *rule {
	return r.add("meta", func(a *attrs) {
		a.u32(unix.NFTA_META_DREG, reg)
		a.u32(unix.NFTA_META_KEY, key)
	})
}

func (r *rule) payload(base, offset, length, reg uint32) *rule {
	return r.add("payload", func(a *attrs) {
		a.u32(unix.NFTA_PAYLOAD_DREG, reg)
		a.u32(unix.NFTA_PAYLOAD_BASE, base)
		a.u32(unix.NFTA_PAYLOAD_OFFSET, offset)
		a.u32(unix.NFTA_PAYLOAD_LEN, length)
	})
}

func (r *rule) ct(key, reg uint32) *rule {
	return r.add("ct", func(a *attrs) {
		a.u32(unix.NFTA_CT_KEY, key)
		a.u32(unix.NFTA_CT_DREG, reg)
	})
}

// ctOriginal loads a field of the connection's original direction: what the
// client sent, before any translation. ctReply loads what an answer has.
func (r *rule) ctOriginal(key, reg uint32) *rule { return r.ctOf(key, 0, reg) }
func (r *rule) ctReply(key, reg uint32) *rule    { return r.ctOf(key, 1, reg) }

func (r *rule) ctOf(key uint32, direction byte, reg uint32) *rule {
	return r.add("ct", func(a *attrs) {
		a.u32(unix.NFTA_CT_KEY, key)
		a.u32(unix.NFTA_CT_DREG, reg)
		a.bytes(unix.NFTA_CT_DIRECTION, []byte{direction})
	})
}

func (r *rule) cmp(op, reg uint32, value []byte) *rule {
	return r.add("cmp", func(a *attrs) {
		a.u32(unix.NFTA_CMP_SREG, reg)
		a.u32(unix.NFTA_CMP_OP, op)
		at := a.nest(unix.NFTA_CMP_DATA)
		a.bytes(unix.NFTA_DATA_VALUE, value)
		a.close(at)
	})
}

// within goes on if what is at reg lies between two values, both included.
func (r *rule) within(reg uint32, from, to []byte) *rule {
	return r.add("range", func(a *attrs) {
		a.u32(unix.NFTA_RANGE_SREG, reg)
		a.u32(unix.NFTA_RANGE_OP, unix.NFT_RANGE_EQ)
		at := a.nest(unix.NFTA_RANGE_FROM_DATA)
		a.bytes(unix.NFTA_DATA_VALUE, from)
		a.close(at)
		at = a.nest(unix.NFTA_RANGE_TO_DATA)
		a.bytes(unix.NFTA_DATA_VALUE, to)
		a.close(at)
	})
}

// anyBit goes on if one of the bits is set.
func (r *rule) anyBit(reg uint32, bits uint32) *rule {
	return r.mask(reg, bits).cmp(unix.NFT_CMP_NEQ, reg, hostU32(0))
}

// mask leaves only these bits.
func (r *rule) mask(reg uint32, bits uint32) *rule {
	return r.add("bitwise", func(a *attrs) {
		a.u32(unix.NFTA_BITWISE_SREG, reg)
		a.u32(unix.NFTA_BITWISE_DREG, reg)
		a.u32(unix.NFTA_BITWISE_LEN, 4)
		at := a.nest(unix.NFTA_BITWISE_MASK)
		a.bytes(unix.NFTA_DATA_VALUE, hostU32(bits))
		a.close(at)
		at = a.nest(unix.NFTA_BITWISE_XOR)
		a.bytes(unix.NFTA_DATA_VALUE, hostU32(0))
		a.close(at)
	})
}

// socket goes on if the node has a socket for the packet as it is, one that listens on
// all addresses included. It asks before the destination is translated, and not in the
// output hook, where it would find the sender's.
func (r *rule) socket(reg uint32) *rule {
	return r.add("socket", func(a *attrs) {
		a.u32(socketKey, socketWildcard)
		a.u32(socketDreg, reg)
	}).cmp(unix.NFT_CMP_LTE, reg, []byte{1}) // whichever: without a socket the rule ends before
}

func (r *rule) random(modulus, reg uint32) *rule {
	return r.add("numgen", func(a *attrs) {
		a.u32(unix.NFTA_NG_DREG, reg)
		a.u32(unix.NFTA_NG_MODULUS, modulus)
		a.u32(unix.NFTA_NG_TYPE, unix.NFT_NG_RANDOM)
		a.u32(unix.NFTA_NG_OFFSET, 0)
	})
}

// hash makes a number of so many registers, and puts it in the first of them.
func (r *rule) hash(reg, count uint32) *rule {
	return r.add("hash", func(a *attrs) {
		a.u32(unix.NFTA_HASH_SREG, reg)
		a.u32(unix.NFTA_HASH_DREG, reg)
		a.u32(unix.NFTA_HASH_LEN, 4*count)
		a.u32(unix.NFTA_HASH_MODULUS, hashModulus)
		a.u32(unix.NFTA_HASH_SEED, hashSeed)
		a.u32(unix.NFTA_HASH_OFFSET, hashOffset)
	})
}

// in goes on if what begins at reg is in the set, notIn if it is not.
func (r *rule) in(s *set, reg uint32) *rule    { return r.lookup(s, reg, 0, 0) }
func (r *rule) notIn(s *set, reg uint32) *rule { return r.lookup(s, reg, 0, unix.NFT_LOOKUP_F_INV) }

// look replaces what begins at reg by what a map has for it, and goes on only
// if the map has anything.
func (r *rule) look(s *set, reg uint32) *rule { return r.lookup(s, reg, reg, 0) }

// lookup is the one that they all are: sreg holds the key, dreg gets what a map
// has for it.
func (r *rule) lookup(s *set, sreg, dreg, flags uint32) *rule {
	return r.add("lookup", func(a *attrs) {
		a.str(unix.NFTA_LOOKUP_SET, s.name)
		a.u32(unix.NFTA_LOOKUP_SREG, sreg)
		if s.isMap() {
			a.u32(unix.NFTA_LOOKUP_DREG, dreg)
		}
		if flags != 0 {
			a.u32(unix.NFTA_LOOKUP_FLAGS, flags)
		}
	})
}

// setPriority notes a number in the packet.
func (r *rule) setPriority(reg uint32) *rule {
	return r.add("meta", func(a *attrs) {
		a.u32(unix.NFTA_META_KEY, unix.NFT_META_PRIORITY)
		a.u32(unix.NFTA_META_SREG, reg)
	})
}

// dynset changes a map or set that packets fill. Neither operation overwrites an existing
// element; an update restarts its timeout (net/netfilter/nft_dynset.c). Timeout 0 means none.
func (r *rule) dynset(op uint32, s *set, key, data uint32, timeout time.Duration) *rule {
	return r.add("dynset", func(a *attrs) {
		a.u32(unix.NFTA_DYNSET_SREG_KEY, key)
		if s.isMap() {
			a.u32(unix.NFTA_DYNSET_SREG_DATA, data)
		}
		a.u32(unix.NFTA_DYNSET_OP, op)
		if timeout > 0 {
			a.u64(unix.NFTA_DYNSET_TIMEOUT, uint64(timeout.Milliseconds()))
		}
		a.str(unix.NFTA_DYNSET_SET_NAME, s.name)
	})
}

const dynsetDelete = 2 // NFT_DYNSET_OP_DELETE; Linux 5.4

// fromLocal goes on if the packet's source is, or is not, an address of the
// node's own.
func (r *rule) fromLocal(op uint32) *rule { return r.local(0, op) }

// local is fromLocal for the source (0) or the destination (1).
func (r *rule) local(which int, op uint32) *rule {
	r.add("fib", func(a *attrs) {
		a.u32(unix.NFTA_FIB_DREG, firstReg)
		a.u32(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
		a.u32(unix.NFTA_FIB_FLAGS, [2]uint32{unix.NFTA_FIB_F_SADDR, unix.NFTA_FIB_F_DADDR}[which])
	})
	return r.cmp(op, firstReg, hostU32(rtnLocal))
}

// value puts bytes into a register.
func (r *rule) value(reg uint32, v []byte) *rule {
	return r.add("immediate", func(a *attrs) {
		a.u32(unix.NFTA_IMMEDIATE_DREG, reg)
		at := a.nest(unix.NFTA_IMMEDIATE_DATA)
		a.bytes(unix.NFTA_DATA_VALUE, v)
		a.close(at)
	})
}

func (r *rule) verdict(code int32, chain string) *rule {
	return r.add("immediate", func(a *attrs) {
		a.u32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		at := a.nest(unix.NFTA_IMMEDIATE_DATA)
		a.verdict(code, chain)
		a.close(at)
	})
}

func (a *attrs) verdict(code int32, chain string) {
	at := a.nest(unix.NFTA_DATA_VERDICT)
	a.u32(unix.NFTA_VERDICT_CODE, uint32(code))
	if chain != "" {
		a.str(unix.NFTA_VERDICT_CHAIN, chain)
	}
	a.close(at)
}

func (r *rule) jumpTo(chain string) *rule { return r.verdict(unix.NFT_GOTO, chain) }
func (r *rule) call(chain string) *rule   { return r.verdict(unix.NFT_JUMP, chain) }   // and come back
func (r *rule) counter() *rule            { return r.add("counter", func(*attrs) {}) } // of packets and bytes
func (r *rule) drop() *rule               { return r.verdict(0, "") }
func (r *rule) accept() *rule             { return r.verdict(1, "") } // of this hook; those after it still see the packet
func (r *rule) ret() *rule                { return r.verdict(unix.NFT_RETURN, "") }

// dnat translates to the address at firstReg and the port behind it.
func (r *rule) dnat(f *family) *rule {
	return r.add("nat", func(a *attrs) {
		a.u32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
		a.u32(unix.NFTA_NAT_FAMILY, f.proto)
		a.u32(unix.NFTA_NAT_REG_ADDR_MIN, firstReg)
		a.u32(unix.NFTA_NAT_REG_PROTO_MIN, firstReg+f.regs())
	})
}

// masquerade gives the packet the node's address, with a port that no other
// packet on its way can get too: two that begin at once may be handed one port
// if ports are counted up, and one of them is then lost (insert_failed).
func (r *rule) masquerade() *rule {
	return r.add("masq", func(a *attrs) { a.u32(unix.NFTA_MASQ_FLAGS, natRangeFullyRandom) })
}

func (r *rule) reject(typ uint32, code byte) *rule {
	return r.add("reject", func(a *attrs) {
		a.u32(unix.NFTA_REJECT_TYPE, typ)
		a.bytes(unix.NFTA_REJECT_ICMP_CODE, []byte{code})
	})
}
