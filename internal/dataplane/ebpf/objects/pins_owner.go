package objects

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/node/kernel"
)

// ownerMap is the pin, beside the directories of an instance, that names their network
// namespace: a bpf file system holds no ordinary files. No program uses it.
const ownerMap = "netns"

// OwnerPath returns the pin that names the network namespace of an instance.
func OwnerPath(bpffs string) string { return filepath.Join(bpffs, ownerMap) }

// OwnerOf reads the network namespace of the pins. known is false if the pin is
// missing.
func OwnerOf(bpffs string) (id kernel.NetnsID, known bool, err error) {
	m, err := ebpf.LoadPinnedMap(OwnerPath(bpffs), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return id, false, nil
	}
	if err == nil {
		defer m.Close()
		err = m.Lookup(uint32(0), &id)
	}
	if err != nil {
		return id, false, fmt.Errorf("read network namespace of pins: %s: %w", OwnerPath(bpffs), err)
	}
	return id, true, nil
}

// SetOwner pins the map after its value is written.
func SetOwner(bpffs string, id kernel.NetnsID) error {
	path := OwnerPath(bpffs)
	m, err := ebpf.LoadPinnedMap(path, nil)
	pinned := err == nil
	if !pinned {
		m, err = ebpf.NewMap(&ebpf.MapSpec{Name: ownerMap, Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1})
	}
	if err == nil {
		defer m.Close()
		err = m.Put(uint32(0), id)
	}
	if err == nil && !pinned {
		err = m.Pin(path)
	}
	if err != nil {
		return fmt.Errorf("write network namespace of pins: %s: %w", path, err)
	}
	return nil
}
