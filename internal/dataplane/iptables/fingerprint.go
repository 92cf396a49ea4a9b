package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/nft"
)

// fingerprint identifies the state of a family's tables. While it stays the same no
// program has changed a rule, and a full sync need not run iptables-save. With nft and
// 5,000 Services that takes over a second. The zero value never equals another.
//
// nf_tables counts the commits of a namespace. ip_tables counts nothing: its fingerprint
// is a sum over the kernel's table without the packet counters.
type fingerprint struct {
	known bool
	sum   uint64
}

func (a fingerprint) same(b fingerprint) bool { return a.known && b.known && a.sum == b.sum }

// newFingerprint returns the fingerprint of the given tables. If it cannot be read, it is
// the zero value, and each audit reads the rules.
func newFingerprint(v Variant, f model.Family, tables []string) fingerprint {
	if v == NFT {
		var c nft.Conn // in the calling thread's network namespace
		defer c.Close()
		n, err := c.Generation(context.Background())
		return fingerprint{err == nil, uint64(n)}
	}
	sum := uint64(0)
	for _, table := range tables {
		s, err := legacySum(table, f)
		if err != nil {
			return fingerprint{}
		}
		sum = sum*31 + s
	}
	return fingerprint{true, sum}
}

// entryHeader describes struct ipt_entry (or ip6t_entry): the size of the header, which
// ends with the packet counters, and the offset of the entry's length.
type entryHeader struct{ size, next int }

var entryHeaders = map[model.Family]entryHeader{
	model.IPv4: {size: 112, next: 90},
	model.IPv6: {size: 168, next: 142},
}

const counterSize = 16 // struct xt_counters

// legacySum hashes a table of ip_tables as the kernel returns it, rule by rule, without
// counters. It covers every bit of every rule.
func legacySum(table string, f model.Family) (sum uint64, err error) {
	failed := withEntries(table, f, func(entries []byte) { sum, err = sumEntries(entries, entryHeaders[f]) })
	return sum, errors.Join(failed, err)
}

// withEntries calls use with a table of ip_tables as the kernel returns it. The kernel
// creates a missing table.
func withEntries(table string, f model.Family, use func(entries []byte)) error {
	return kernel.LegacyTable{Name: table, V6: f == model.IPv6}.Read(use)
}

func sumEntries(entries []byte, h entryHeader) (uint64, error) {
	var sum maphash.Hash
	sum.SetSeed(hashSeed)
	for len(entries) > 0 {
		if len(entries) < h.size {
			return 0, fmt.Errorf("read table: an entry is cut off")
		}
		next := int(binary.NativeEndian.Uint16(entries[h.next:]))
		if next < h.size || next > len(entries) {
			return 0, fmt.Errorf("read table: an entry of %d bytes in %d", next, len(entries))
		}
		sum.Write(entries[:h.size-counterSize])
		sum.Write(entries[h.size:next])
		entries = entries[next:]
	}
	return sum.Sum64(), nil
}
