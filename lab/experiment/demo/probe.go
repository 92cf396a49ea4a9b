package demo

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// asks is the number of requests to each address: enough to see both of two pods nearly
// always.
const asks = 6

// Probe is one Service address, with several requests from one source.
type Probe struct {
	Service  string         `json:"service"`
	Protocol string         `json:"protocol"`
	Way      string         `json:"way"` // "ClusterIP", "NodePort of node0", ...
	Address  netip.AddrPort `json:"address"`
	From     string         `json:"from"`
	// Answers holds the answers, equal ones together, sorted.
	Answers []Answer `json:"answers"`
	Failed  int      `json:"failed"`

	from *topology.Host
}

// Answer is a server that answered Count times. Failures have the outcome
// ("refused", "silent") in place of the server.
type Answer struct {
	Server string `json:"server"`
	// Saw is the source that the server saw: the name of the host whose address
	// it is, or the address itself.
	Saw   string `json:"saw,omitempty"`
	Count int    `json:"count"`
}

// probes lists every path to every Service port that any pod may serve. It omits Services
// with a local policy: they do not answer on nodes without a pod, and the measurements
// cover them.
func probes(o *objects, c *topology.Cluster) []*Probe {
	var out []*Probe
	for _, s := range o.services {
		if s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
			continue
		}
		for _, p := range s.Spec.Ports {
			out = append(out, portProbes(s, p, c)...)
		}
	}
	return out
}

func portProbes(s *corev1.Service, p corev1.ServicePort, c *topology.Cluster) []*Probe {
	client, pod, node := c.Client(0), c.Pod(0, 2), c.Node(1)
	var out []*Probe
	add := func(way, addr string, port int32, from *topology.Host) {
		a, err := netip.ParseAddr(addr)
		if err != nil {
			return // the agent reports it, and the row is missed in the table
		}
		out = append(out, &Probe{Service: s.Name, Protocol: string(p.Protocol), Way: way,
			Address: netip.AddrPortFrom(a, uint16(port)), From: from.Name, from: from})
	}
	for _, a := range s.Spec.ClusterIPs {
		add("ClusterIP", a, p.Port, pod)
		add("ClusterIP", a, p.Port, node)
	}
	if p.NodePort != 0 {
		for i := range c.Spec.Nodes {
			for _, a := range c.Node(i).Addrs() {
				add("NodePort of "+c.Node(i).Name, a.String(), p.NodePort, client)
			}
		}
	}
	for _, a := range s.Spec.ExternalIPs {
		add("external IP", a, p.Port, client)
	}
	for _, i := range s.Status.LoadBalancer.Ingress {
		add("LoadBalancer IP", i.IP, p.Port, client)
	}
	return out
}

// ask sends the request several times and records the answers.
func (v *Probe) ask(ctx context.Context, hosts map[netip.Addr]string) error {
	for range asks {
		q := workload.Question{Kind: kindOf(corev1.Protocol(v.Protocol)), To: v.Address.String(), Timeout: time.Second}
		a, err := workload.Ask(ctx, v.from, q)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("ask %s from %s: %w", v.Address, v.From, err)
		}
		v.note(a, hosts)
		if v.Failed == 2 {
			return nil // a silent address costs a second each time
		}
	}
	return nil
}

// note counts one answer.
func (v *Probe) note(a workload.Answer, hosts map[netip.Addr]string) {
	n := Answer{Server: a.Server, Count: 1}
	if a.Outcome != workload.Answered {
		v.Failed++
		n.Server = a.Outcome
	} else {
		source := a.Client.Addr().Unmap()
		if n.Saw = hosts[source]; n.Saw == "" {
			n.Saw = source.String()
		}
	}
	for i := range v.Answers {
		if v.Answers[i].Server == n.Server && v.Answers[i].Saw == n.Saw {
			v.Answers[i].Count++
			return
		}
	}
	v.Answers = append(v.Answers, n)
	slices.SortFunc(v.Answers, func(a, b Answer) int {
		return cmp.Or(strings.Compare(a.Server, b.Server), strings.Compare(a.Saw, b.Saw))
	})
}

// answeredBy is "node0-pod0 ×4 (client0), node1-pod0 ×2 (node0)".
func (v *Probe) answeredBy() string {
	var parts []string
	for _, a := range v.Answers {
		text := fmt.Sprintf("%s ×%d", a.Server, a.Count)
		if a.Saw != "" {
			text += " (" + a.Saw + ")"
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}

// hostNames maps the addresses of the cluster to names.
func hostNames(c *topology.Cluster) map[netip.Addr]string {
	names := map[netip.Addr]string{}
	for _, h := range c.Hosts() {
		for _, a := range h.Addrs() {
			names[a] = h.Name
		}
	}
	return names
}
