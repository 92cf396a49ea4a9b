package doctor

import (
	"fmt"
	"strings"
)

// meshWithSocketHooks reports pods whose connections a sidecar redirects, and socket hooks
// translate before.
type meshWithSocketHooks struct{}

func (meshWithSocketHooks) Name() string  { return "sidecars" }
func (meshWithSocketHooks) About() string { return "pods whose connections go to a mesh's sidecar" }

func (meshWithSocketHooks) Find(n *Node) (out []Finding) {
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		if !ns.Hooked {
			continue
		}
		f := Finding{
			ID: "mesh-with-socket-hooks", Severity: Warning, Namespace: ns.Namespace.String(),
			Title: "rules for Services of a mesh are not applied: socket hooks hide the Services from a sidecar",
			Packets: "The sidecar gets connections to an endpoint's address, not to the Service's. It applies no routes, retries or policies " +
				"of the Service.",
			Remedy: "Exclude the Pod from socket hooks: its packets are translated one by one then. For all Pods: --socket-hooks host (chart: " +
				"socketHooks: host).",
			Settings: strings.Join([]string{
				"# Pod, or the template of its Deployment", "metadata:", "  annotations:", "    spillway.dev/socket-hooks: \"off\"", "",
			}, "\n"),
		}
		redirects := ns.Rules.OutputRedirects()
		for _, r := range redirects[:min(len(redirects), 3)] {
			f.Evidence = append(f.Evidence, fmt.Sprintf("%s redirects connections of the pod: %s", r.Where(), r.Text))
		}
		f.Evidence = append(f.Evidence, fmt.Sprintf("the cgroup of process %d has Spillway's socket hooks", ns.Namespace.PID))
		out = append(out, f)
	}
	return out
}
