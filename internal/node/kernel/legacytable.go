package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// LegacyTable is a table of ip_tables or ip6_tables, the legacy variant of iptables. Its
// methods work in the calling thread's network namespace and need CAP_NET_ADMIN there.
type LegacyTable struct {
	Name string // "nat"
	V6   bool
}

// LegacyTableInfo describes a table without its rules.
type LegacyTableInfo struct {
	Entries uint32 // rules, heads and ends of chains
	Size    uint32 // of all entries, in bytes
}

// LegacyTables lists the existing tables. Request no other table: a request creates it.
// A kernel without ip_tables has none.
func LegacyTables(v6 bool) ([]string, error) {
	path := "/proc/thread-self/net/ip_tables_names"
	if v6 {
		path = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list tables of legacy iptables: %w", err)
	}
	return strings.Fields(string(names)), nil
}

// From linux/netfilter_ipv4/ip_tables.h, and the same for IPv6.
const (
	soGetInfo    = 64
	soGetEntries = 65
)

// legacyGetInfo is struct ipt_getinfo.
type legacyGetInfo struct {
	name       [32]byte // XT_TABLE_MAXNAMELEN
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	entries    uint32
	size       uint32
}

// socket opens a socket for requests about the table.
func (t LegacyTable) socket() (fd, level int, err error) {
	domain, level := unix.AF_INET, unix.SOL_IP
	if t.V6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, 0, fmt.Errorf("read table %s: %w", t.Name, err)
	}
	return fd, level, nil
}

// Info reads the size of the table. Its cost does not depend on the size.
func (t LegacyTable) Info() (LegacyTableInfo, error) {
	fd, level, err := t.socket()
	if err != nil {
		return LegacyTableInfo{}, err
	}
	defer unix.Close(fd)
	return t.info(fd, level)
}

func (t LegacyTable) info(fd, level int) (LegacyTableInfo, error) {
	var info legacyGetInfo
	copy(info.name[:], t.Name)
	if err := getsockopt(fd, level, soGetInfo, unsafe.Slice((*byte)(unsafe.Pointer(&info)), int(unsafe.Sizeof(info)))); err != nil {
		return LegacyTableInfo{}, fmt.Errorf("read table %s: %w", t.Name, err)
	}
	return LegacyTableInfo{Entries: info.entries, Size: info.size}, nil
}

// Read calls use with the table as the kernel returns it: a sequence of struct ipt_entry
// (or ip6t_entry). The bytes are valid until use returns.
func (t LegacyTable) Read(use func(entries []byte)) error {
	fd, level, err := t.socket()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	info, err := t.info(fd, level)
	if err != nil {
		return err
	}
	// struct ipt_get_entries: the name, the size, padding to 8, the entries.
	const head = 40
	buf, err := unix.Mmap(-1, 0, head+int(info.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("read table %s: %w", t.Name, err)
	}
	// Megabytes every half minute, outside the Go heap.
	defer func() { _ = unix.Munmap(buf) }()
	copy(buf, t.Name)
	binary.NativeEndian.PutUint32(buf[32:], info.Size)
	if err := getsockopt(fd, level, soGetEntries, buf); err != nil {
		return fmt.Errorf("read table %s: %w", t.Name, err)
	}
	use(buf[head:])
	return nil
}

// LegacyTarget is the target of a rule of a LegacyTable. It is an extension's name
// ("DNAT"), "" for a verdict or a jump, "ERROR" for the head of a chain.
type LegacyTarget struct {
	Name     string
	Revision uint8
	Data     []byte // the extension's own structure
}

// EachTarget calls f with the target of each of the entries that Read gives, until f
// returns false.
func (t LegacyTable) EachTarget(entries []byte, f func(LegacyTarget) bool) error {
	// Offsets in struct ipt_entry and struct ip6t_entry of the fields with the offsets of
	// the target and of the next entry.
	at := 88
	if t.V6 {
		at = 140
	}
	const header = 32 // struct xt_entry_target: size, name, revision
	for len(entries) > 0 {
		if len(entries) < at+4 {
			return fmt.Errorf("read table %s: an entry is cut off", t.Name)
		}
		target := int(binary.NativeEndian.Uint16(entries[at:]))
		next := int(binary.NativeEndian.Uint16(entries[at+2:]))
		if target < at || target+header > next || next > len(entries) {
			return fmt.Errorf("read table %s: an entry of %d bytes, with the target at %d, in %d", t.Name, next, target, len(entries))
		}
		e := entries[target:next]
		if !f(LegacyTarget{Name: unix.ByteSliceToString(e[2:31]), Revision: e[31], Data: e[header:]}) {
			return nil
		}
		entries = entries[next:]
	}
	return nil
}

func getsockopt(fd, level, option int, buf []byte) error {
	size := uint32(len(buf))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
