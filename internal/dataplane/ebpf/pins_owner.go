package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/node/kernel"
)

// ownerMap is the pin, beside the directories of an instance, that names their network
// namespace: a bpf file system holds no ordinary files. No program uses it.
const ownerMap = "netns"

func ownerPath(bpffs string) string { return filepath.Join(bpffs, ownerMap) }

// claimPins assigns the pins to this network namespace. Links cannot move: an agent of
// another namespace with this directory would take live links for dead ones and remove
// them.
func claimPins(bpffs string) error {
	own, err := kernel.CurrentNetns()
	if err != nil {
		return fmt.Errorf("find out network namespace: %w", err)
	}
	owner, known, err := ownerOf(bpffs)
	if err != nil {
		return err
	}
	switch {
	case known && owner.Cookie == own.Cookie:
		return nil
	case known:
		if where := kernel.FindNetns(owner); where != "" || attach.Attached(bpffs) {
			return fmt.Errorf("bpffs %s: belongs to the agent of another network namespace, %s: give another --bpffs, or uninstall that agent first: %s",
				bpffs, owner, cleanupThere(bpffs, where))
		}
	}
	return setOwner(bpffs, own)
}

// cleanupThere returns the command that cleans up in the namespace at a path.
func cleanupThere(bpffs, where string) string {
	command := "spillway agent --cleanup --bpffs " + bpffs
	if where == "" {
		return command
	}
	return "nsenter --net=" + where + " " + command
}

// ownerOf reads the network namespace of the pins. known is false if the pin is
// missing.
func ownerOf(bpffs string) (id kernel.NetnsID, known bool, err error) {
	m, err := ebpf.LoadPinnedMap(ownerPath(bpffs), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return id, false, nil
	}
	if err == nil {
		defer m.Close()
		err = m.Lookup(uint32(0), &id)
	}
	if err != nil {
		return id, false, fmt.Errorf("read network namespace of pins: %s: %w", ownerPath(bpffs), err)
	}
	return id, true, nil
}

// setOwner pins the map after its value is written.
func setOwner(bpffs string, id kernel.NetnsID) error {
	path := ownerPath(bpffs)
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
