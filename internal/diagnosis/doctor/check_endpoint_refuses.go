package doctor

import (
	"fmt"

	"spillway.dev/spillway/internal/page"
)

// endpointRefuses reports endpoints that answer new connections with an RST.
type endpointRefuses struct{}

func (endpointRefuses) Name() string { return "refusing endpoints" }
func (endpointRefuses) About() string {
	return "recent connections that each endpoint has refused"
}

func (endpointRefuses) Find(n *Node) (out []Finding) {
	if n.Traffic == nil {
		return nil
	}
	for _, u := range n.Traffic.Refusing {
		out = append(out, u.finding(Finding{
			ID: "endpoint-refuses", Severity: Critical,
			Title: fmt.Sprintf("connections to Service %s fail: endpoint %s refuses them", u.Service, u.name()),
			Evidence: []string{
				fmt.Sprintf("%s of %s in the last %.0f s were answered with an RST, from %s", page.Counted(u.Flows, "connection"), u.Protocol,
					u.Window.Seconds(), u.from()),
				fmt.Sprintf("the newest of them began about %.0f s ago; the endpoint has accepted no later one", u.Latest.Seconds()),
			},
			Packets: "The endpoint answers the first packet of each connection with an RST: no process listens on this port, or a firewall " +
				"rejects. Each client that gets this endpoint fails at once.",
			Remedy: "Look at the pod: does its process run, and does it listen on this port (the targetPort of the Service), on all addresses " +
				"rather than on 127.0.0.1? A readiness probe takes such a pod out of the Service.",
		}))
	}
	return out
}
