package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// NFSMount is a mount of the node whose server is a Service.
type NFSMount struct {
	Server netip.AddrPort
	At     string
}

// nfsPort is the server's port if a mount names none (RFC 7530, 3.1.1).
const nfsPort = 2049

// readNFS reads the mounts of the node, if socket hooks may translate their connections.
func (l *loader) readNFS() error {
	if l.hooks.Service == nil {
		return nil
	}
	// Process 1 has the node's mounts; in a container without the node's processes, none has.
	f, err := os.Open("/proc/1/mountinfo")
	if errors.Is(err, fs.ErrPermission) {
		f, err = os.Open("/proc/self/mountinfo")
	}
	if err != nil {
		return fmt.Errorf("read mounts of the node: %w", err)
	}
	defer f.Close()
	all, err := nfsMounts(f)
	for _, m := range all {
		if l.hooks.Service(m.Server) {
			l.node.NFS = append(l.node.NFS, m)
		}
	}
	return err
}

// nfsMounts reads the NFS mounts in a file such as /proc/1/mountinfo.
func nfsMounts(r io.Reader) (list []NFSMount, err error) {
	mounts, err := mountinfo.GetMountsFromReader(r, func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "nfs" && m.FSType != "nfs4", false
	})
	if err != nil {
		return nil, fmt.Errorf("read mounts of the node: %w", err)
	}
	for _, m := range mounts {
		var server string
		port := uint16(nfsPort)
		for option := range strings.SplitSeq(m.VFSOptions, ",") {
			name, value, _ := strings.Cut(option, "=")
			switch name {
			case "addr":
				server = value
			case "port":
				if n, err := strconv.ParseUint(value, 10, 16); err == nil && n > 0 {
					port = uint16(n)
				}
			}
		}
		if addr, err := netip.ParseAddr(server); err == nil {
			list = append(list, NFSMount{netip.AddrPortFrom(addr.Unmap(), port), m.Mountpoint})
		}
	}
	slices.SortFunc(list, func(a, b NFSMount) int { return cmp.Or(a.Server.Compare(b.Server), cmp.Compare(a.At, b.At)) })
	return list, nil
}
