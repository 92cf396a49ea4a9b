package objects

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
)

// SeedPin is the pin of the map with the seed of the programs' hashes. It belongs to no
// ABI version.
const SeedPin = "seed"

// hashSeed returns the seed of all hashes of packets. They choose a client's endpoint,
// its allowed ports and its counter. The seed is random, so that a client cannot
// choose. It stays as long as the pins, so that a client whose connection the flow
// table has lost still reaches the same endpoint.
func hashSeed(bpffs string) (uint32, error) {
	pin := filepath.Join(bpffs, SeedPin)
	var seed uint32
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err == nil {
		defer m.Close()
		if err := m.Lookup(uint32(0), &seed); err == nil && seed != 0 {
			return seed, nil
		}
	}
	if !errors.Is(err, fs.ErrNotExist) { // or it is no map
		if err := os.Remove(pin); err != nil {
			return 0, fmt.Errorf("remove unreadable hash seed: %w", err)
		}
	}
	m, err = ebpf.NewMap(&ebpf.MapSpec{Name: "spillway_seed", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return 0, fmt.Errorf("create map for the hash seed: %w", err)
	}
	defer m.Close()
	var random [4]byte
	_, _ = rand.Read(random[:]) // it never fails
	seed = binary.NativeEndian.Uint32(random[:]) | 1
	if err := m.Put(uint32(0), seed); err != nil {
		return 0, fmt.Errorf("write hash seed: %w", err)
	}
	// Written before it is pinned: a later run finds it complete or not at all.
	if err := m.Pin(pin); err != nil {
		return 0, fmt.Errorf("pin hash seed: %w", err)
	}
	return seed, nil
}
