package doctor

import (
	"fmt"

	"spillway.dev/spillway/internal/node/kernel"
)

// keepsAddress is the first kernel that keeps a mount's address when a hook translates its
// connection ("net: Avoid address overwrite in kernel_connect").
var keepsAddress = kernel.Version{Major: 6, Minor: 6}

// nfsWithSocketHooks reports NFS mounts of the node that may hang when an endpoint goes.
type nfsWithSocketHooks struct{}

func (nfsWithSocketHooks) Name() string  { return "NFS mounts" }
func (nfsWithSocketHooks) About() string { return "NFS mounts of the node whose server is a Service" }

func (nfsWithSocketHooks) Find(n *Node) []Finding {
	if len(n.NFS) == 0 || !n.Kernel.Less(keepsAddress) {
		return nil
	}
	f := Finding{
		ID: "nfs-with-socket-hooks", Severity: Warning,
		Title: "NFS mounts will hang when their server's Pod is replaced: socket hooks translate their connections",
		Packets: fmt.Sprintf("Linux before %d.%d forgets the Service's address. After the endpoint has gone, such a mount connects to it "+
			"again and again.", keepsAddress.Major, keepsAddress.Minor),
		Remedy: "Use Linux 6.6, or a stable release with the fix \"net: Avoid address overwrite in kernel_connect\". " +
			"Else give these mounts an address that is no Service, or turn socket hooks off: --socket-hooks off.",
	}
	for _, m := range n.NFS[:min(len(n.NFS), 3)] {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s is mounted from %s, a Service", m.At, m.Server))
	}
	if more := len(n.NFS) - 3; more > 0 {
		f.Evidence = append(f.Evidence, fmt.Sprintf("and %d more", more))
	}
	f.Evidence = append(f.Evidence, "the kernel is "+n.Kernel.String())
	return []Finding{f}
}
