package nft

import (
	"encoding/binary"
	"math/bits"
)

// Rule.Hash is jhash with this seed, reduced to this many values from 1 on.
const (
	hashSeed    = 1
	hashModulus = 1<<32 - 1
	hashOffset  = 1
)

// Hash computes what Rule.Hash computes in the kernel (include/linux/jhash.h,
// net/netfilter/nft_hash.c).
func Hash(key []byte) uint32 {
	return uint32(uint64(jhash(key, hashSeed))*hashModulus>>32) + hashOffset
}

func jhash(key []byte, seed uint32) uint32 {
	a := 0xdeadbeef + uint32(len(key)) + seed
	b, c := a, a
	for ; len(key) > 12; key = key[12:] {
		a += binary.NativeEndian.Uint32(key)
		b += binary.NativeEndian.Uint32(key[4:])
		c += binary.NativeEndian.Uint32(key[8:])
		a, b, c = jhashMix(a, b, c)
	}
	if len(key) == 0 {
		return c
	}
	var rest [12]byte
	copy(rest[:], key)
	a += binary.LittleEndian.Uint32(rest[:])
	b += binary.LittleEndian.Uint32(rest[4:])
	c += binary.LittleEndian.Uint32(rest[8:])
	return jhashFinal(a, b, c)
}

func jhashMix(a, b, c uint32) (uint32, uint32, uint32) {
	for _, r := range [...][3]int{{4, 6, 8}, {16, 19, 4}} {
		a = (a - c) ^ bits.RotateLeft32(c, r[0])
		c += b
		b = (b - a) ^ bits.RotateLeft32(a, r[1])
		a += c
		c = (c - b) ^ bits.RotateLeft32(b, r[2])
		b += a
	}
	return a, b, c
}

func jhashFinal(a, b, c uint32) uint32 {
	c = (c ^ b) - bits.RotateLeft32(b, 14)
	a = (a ^ c) - bits.RotateLeft32(c, 11)
	b = (b ^ a) - bits.RotateLeft32(a, 25)
	c = (c ^ b) - bits.RotateLeft32(b, 16)
	a = (a ^ c) - bits.RotateLeft32(c, 4)
	b = (b ^ a) - bits.RotateLeft32(a, 14)
	return (c ^ b) - bits.RotateLeft32(b, 24)
}
