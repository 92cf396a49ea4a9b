package kernel

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// HaveTCX reports whether programs can be attached to interfaces by tcx links
// (Linux 6.6). It only asks which are there.
func HaveTCX() bool {
	const loopback = 1 // lo's index in every network namespace
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress})
	return err == nil || errors.Is(err, unix.ENOENT)
}
