package doctor

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// hooksOf returns what the socket hooks of an instance translate, by its maps.
func hooksOf(bpffs string) (h doctor.Hooks, closeView func()) {
	view, err := inspect.OpenView(bpffs)
	if err != nil {
		return h, func() {} // no instance, or one of another version
	}
	served := attach.ServedCgroup(bpffs)
	if len(served.Hooks) == 0 {
		return h, view.Close
	}
	h.Service = func(at netip.AddrPort) bool {
		f := view.Frontend(model.TCP, at)
		return f != nil && !f.Has("endpoint")
	}
	if !slices.Contains(view.Settings().Flags, "hooks_host") {
		tree := kernel.FindCgroupTree()
		h.Pod = func(pid int) bool { return view.Hooked(served, &tree, tree.Of(pid)) }
	}
	return h, view.Close
}
