package kernel

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// HaveCapability reports whether the calling thread has a capability (unix.CAP_*) in
// its effective set.
func HaveCapability(capability int) (bool, error) {
	_, data, err := capabilities()
	if err != nil {
		return false, err
	}
	return data[capability/32].Effective&(1<<(capability%32)) != 0, nil
}

// NeedCapability returns an error of one line that names a capability (unix.CAP_*) if the
// calling thread lacks it. what needs it, such as "iptables": without it, programs and the
// kernel name other causes, such as a missing module.
func NeedCapability(what string, capability int, name string) error {
	if have, err := HaveCapability(capability); err != nil || have {
		return err
	}
	return fmt.Errorf("%s needs %s, which this process lacks: run as root, or add it to the container's capabilities", what, name)
}

// DropCapabilities removes capabilities (unix.CAP_*) from the permitted, effective and
// inheritable sets of every thread of this process, for good. Dropping one that the
// process does not have is no error. Programs that the process starts regain them only
// if they run as root without no_new_privs, and a container sets that for
// allowPrivilegeEscalation: false. A binary with cgo gets ENOTSUP.
func DropCapabilities(list ...int) error {
	hdr, data, err := capabilities()
	if err != nil {
		return err
	}
	for _, c := range list {
		bit := uint32(1) << (c % 32)
		set := &data[c/32]
		set.Effective, set.Permitted, set.Inheritable = set.Effective&^bit, set.Permitted&^bit, set.Inheritable&^bit
	}
	// Capabilities belong to a thread: a call for the caller's alone would leave the
	// others as they are.
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)),
		uintptr(unsafe.Pointer(&data[0])), 0); errno != 0 {
		return fmt.Errorf("drop capabilities %v: %w", list, errno)
	}
	return nil
}

func capabilities() (hdr unix.CapUserHeader, data [2]unix.CapUserData, err error) {
	hdr.Version = unix.LINUX_CAPABILITY_VERSION_3
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return hdr, data, fmt.Errorf("read capabilities: %w", err)
	}
	return hdr, data, nil
}
