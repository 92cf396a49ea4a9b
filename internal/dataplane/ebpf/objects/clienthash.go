package objects

// ClientHash returns the hash of a client's address, for the map sources. It mirrors addr_hash of bpf/lib/base.h.
func ClientHash(seed uint32, k *TCTuple) uint32 {
	h := seed
	for _, w := range k.Saddr.W {
		h = mix(h, w)
	}
	return h
}

// ClientNetworkHash returns the hash of the network of an IPv6 client. It mirrors client_network_hash of
// bpf/lib/flow/client_share.h.
func ClientNetworkHash(seed uint32, k *TCTuple) uint32 {
	return mix(mix(^seed, k.Saddr.W[0]), k.Saddr.W[1])
}

// mix mirrors mix of bpf/lib/base.h.
func mix(h, v uint32) uint32 {
	h ^= v
	h *= 0x85ebca6b
	h ^= h >> 13
	h *= 0xc2b2ae35
	h ^= h >> 16
	return h
}
