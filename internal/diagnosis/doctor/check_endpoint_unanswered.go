package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// endpointUnanswered reports endpoints that answer no new connection. UDP is left out: many
// protocols on it have no answers.
type endpointUnanswered struct{}

func (endpointUnanswered) Name() string { return "endpoints" }
func (endpointUnanswered) About() string {
	return "recent connections to each endpoint and its answers"
}

func (endpointUnanswered) Find(n *Node) (out []Finding) {
	if n.Traffic == nil {
		return nil
	}
	denies := n.denies()
	for _, u := range n.Traffic.Unanswered {
		out = append(out, u.finding(Finding{
			ID: "endpoint-unanswered", Severity: Critical,
			Title: fmt.Sprintf("connections to Service %s fail: endpoint %s does not answer", u.Service, u.name()),
			Evidence: append([]string{
				fmt.Sprintf("%s of %s in the last %.0f s without an answer, from %s", page.Counted(u.Flows, "connection"), u.Protocol,
					u.Window.Seconds(), u.from()),
				fmt.Sprintf("the oldest of them began about %.0f s ago, the newest %.0f s ago; the endpoint has answered no later one",
					u.Longest.Seconds(), u.Latest.Seconds()),
			}, denies...),
			Packets: "The node sends the first packets of connections to this endpoint, and no packet comes back. Each client that gets this " +
				"endpoint waits and fails.",
			Remedy: "Compare the address with that of the pod, and look at the pod and its node: is it stuck, unreachable, or behind a " +
				"NetworkPolicy or firewall that drops? Delete the pod, or give it a readiness probe that fails in this state: the Service then " +
				"uses other endpoints.",
		}))
	}
	return out
}

// denies points to policies that deny packets meanwhile: a pod whose clients they deny is well. Denials
// are counted by policy, so whether it is this pod is unknown.
func (n *Node) denies() []string {
	if len(n.Traffic.Denials) == 0 {
		return nil
	}
	text := "DoNotTrackPolicy " + n.Traffic.Denials[0].Policy
	if more := len(n.Traffic.Denials) - 1; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return []string{text + " denied packets recently, perhaps these: see policy-denies first"}
}

// name names the endpoint for people.
func (u *FailingEndpoint) name() string {
	if u.Pod != "" {
		return "pod " + u.Pod + " (" + u.Endpoint + ")"
	}
	return u.Endpoint
}

// from names the clients.
func (u *FailingEndpoint) from() string {
	var texts []string
	if len(u.Clients) > 0 {
		texts = append(texts, mostClients(u.Clients))
	}
	if u.Sockets > 0 {
		texts = append(texts, fmt.Sprintf("sockets of this node and its pods (%d, the last one of %s)", u.Sockets, u.Socket))
	}
	return strings.Join(texts, " and ")
}

// clients is how many clients are known.
func (u *FailingEndpoint) clients() int {
	if u.Sockets > 0 {
		return len(u.Clients) + 1
	}
	return len(u.Clients)
}

// finding completes a finding about the endpoint.
func (u *FailingEndpoint) finding(f Finding) Finding {
	f.Object = serviceObject(u.Service, u.Endpoint)
	f.Numbers = map[string]float64{"connections": float64(u.Flows), "clients": float64(u.clients()), "longest_seconds": u.Longest.Seconds(),
		"latest_seconds": u.Latest.Seconds()}
	if u.Node != "" {
		f.Evidence = append(f.Evidence, "the endpoint is on node "+u.Node)
	}
	f.Commands = u.commands()
	return f
}

// commands shows packets that the endpoint's node drops, and its pod.
func (u *FailingEndpoint) commands() (list []string) {
	if at, err := netip.ParseAddrPort(u.Endpoint); err == nil {
		command := fmt.Sprintf("spillway drops --address %s --port %d --for 10s", at.Addr(), at.Port())
		if u.Node != "" {
			command += " # on node " + escape.Text(u.Node) // a line break would end the comment
		}
		list = append(list, command)
	}
	if namespace, name, ok := strings.Cut(u.Pod, "/"); ok {
		list = append(list, fmt.Sprintf("kubectl --namespace %s describe pod %s", escape.Shell(namespace), escape.Shell(name)))
	}
	return list
}

// mostClients names the clients with the most connections or packets.
func mostClients(clients map[string]int) string {
	const most = 3
	list := slices.SortedFunc(maps.Keys(clients), func(a, b string) int {
		return cmp.Or(cmp.Compare(clients[b], clients[a]), cmp.Compare(a, b))
	})
	var texts []string
	for _, c := range list[:min(most, len(list))] {
		texts = append(texts, fmt.Sprintf("%s (%d)", c, clients[c]))
	}
	if len(list) > most {
		return fmt.Sprintf("%s and %s", strings.Join(texts, ", "), page.Counted(len(list)-most, "more client"))
	}
	return strings.Join(texts, ", ")
}
