package doctor

import (
	"fmt"
	"strings"

	"spillway.dev/spillway/internal/escape"
)

// serviceWithoutEndpoints reports Services that clients connect to and that have no endpoint.
type serviceWithoutEndpoints struct{}

func (serviceWithoutEndpoints) Name() string  { return "empty Services" }
func (serviceWithoutEndpoints) About() string { return "clients of Services that have no endpoint" }

func (serviceWithoutEndpoints) Find(n *Node) (out []Finding) {
	for _, r := range n.refusals(ReasonNoEndpoint) {
		f := Finding{
			ID: "service-without-endpoints", Severity: Critical, Object: serviceObject(r.Service, ""),
			Title: fmt.Sprintf("clients connect to %s, which has no endpoint: %s", r.Service, r.Cause),
			Evidence: []string{
				r.packets(),
				fmt.Sprintf("the last client is %s; it asked %s by %s", r.Client, r.Address, r.Protocol),
			},
			Numbers: map[string]float64{"packets": float64(r.Packets), "clients": float64(len(r.Clients))},
			Packets: "Each connection to the Service is refused at once: its clients get \"connection refused\", and datagrams an ICMP error.",
			Remedy: "Compare spec.selector of the Service with the labels of its Pods. If they match, see why no Pod is ready. If the Service is " +
				"not needed, stop its clients.",
		}
		service, _, _ := strings.Cut(r.Service, ":")
		if namespace, name, ok := strings.Cut(service, "/"); ok {
			f.Commands = []string{
				fmt.Sprintf("kubectl --namespace %s get service %s -o wide", escape.Shell(namespace), escape.Shell(name)),
				fmt.Sprintf("kubectl --namespace %s get pods --show-labels", escape.Shell(namespace)),
			}
		}
		out = append(out, f)
	}
	return out
}
