package doctor

import "fmt"

// nodePortTaken reports processes of the node that listen on a Service's port.
type nodePortTaken struct{}

func (nodePortTaken) Name() string  { return "node ports" }
func (nodePortTaken) About() string { return "processes of the node that listen on a Service's port" }

func (nodePortTaken) Find(n *Node) (out []Finding) {
	if n.Traffic == nil {
		return nil
	}
	for _, t := range n.Traffic.Taken {
		out = append(out, Finding{
			ID: "node-port-taken", Severity: Warning, Object: nodeObject(fmt.Sprintf("port %d/%s", t.Port, t.Protocol)),
			Title: fmt.Sprintf("%s takes port %d/%s from a process of the node", t.Service, t.Port, t.Protocol),
			Evidence: []string{fmt.Sprintf("a %s socket of the node is bound to port %d, which %s has at the node's addresses",
				t.Protocol, t.Port, t.Service)},
			Packets:  "Clients that ask the node's address get the Service. Only loopback addresses lead to the process.",
			Remedy:   "Change the port of one of the two. The first command shows the process.",
			Commands: []string{fmt.Sprintf("ss -Hlnp -A %s 'sport = :%d'", map[string]string{"TCP": "tcp", "UDP": "udp"}[t.Protocol], t.Port)},
		})
	}
	return out
}
