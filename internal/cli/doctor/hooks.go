package doctor

import (
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/node/kernel"
)

// hooks returns the function for doctor.Config.Hooked; nil without socket hooks for pods.
func hooks(bpffs string) (hooked func(pid int) bool, closeView func()) {
	view, err := ebpf.OpenView(bpffs)
	if err != nil {
		return nil, func() {} // no instance, or one of another version
	}
	served := attach.ServedCgroup(bpffs)
	if len(served.Hooks) == 0 || slices.Contains(view.Settings().Flags, "hooks_host") {
		return nil, view.Close
	}
	tree := kernel.FindCgroupTree()
	return func(pid int) bool { return view.Hooked(served, &tree, tree.Of(pid)) }, view.Close
}
