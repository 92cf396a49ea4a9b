package services

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"connectrpc.com/connect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	pages "spillway.dev/spillway/internal/page"
)

// listAll prints the Services of several nodes.
func listAll(ctx context.Context, out, stderr io.Writer, nodes *reach.Nodes, namespace string, output cli.Output) error {
	ask := func(ctx context.Context, d nodeclient.Dialer) ([]*nodev1alpha1.Service, error) {
		return nodeclient.Services(ctx, nodeclient.New(d), namespace)
	}
	return printAnswers(ctx, out, stderr, nodes, "list Services", ask, output)
}

// showAll prints one Service of several nodes. A node that does not know it has no such Service.
func showAll(ctx context.Context, out, stderr io.Writer, nodes *reach.Nodes, req *nodev1alpha1.GetServiceRequest, output cli.Output) error {
	does := fmt.Sprintf("show Service %s/%s", req.Namespace, req.Name)
	ask := func(ctx context.Context, d nodeclient.Dialer) ([]*nodev1alpha1.Service, error) {
		resp, err := nodeclient.New(d).GetService(ctx, req)
		if connect.CodeOf(err) == connect.CodeNotFound {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return []*nodev1alpha1.Service{resp.Service}, nil
	}
	return printAnswers(ctx, out, stderr, nodes, does, ask, output)
}

// printAnswers asks nodes for Services, and prints them.
func printAnswers(ctx context.Context, out, stderr io.Writer, nodes *reach.Nodes, does string,
	ask func(context.Context, nodeclient.Dialer) ([]*nodev1alpha1.Service, error), output cli.Output) error {
	answers, err := reach.Ask(ctx, nodes, does, stderr, ask)
	if err != nil {
		return err
	}
	if err := output.Print(out, nodesResult{answers}); err != nil {
		return err
	}
	return answers.Silent(does)
}

// nodesResult is the Services of several nodes.
type nodesResult struct {
	reach.Answers[[]*nodev1alpha1.Service]
}

// MarshalJSON implements json.Marshaler.
func (r nodesResult) MarshalJSON() ([]byte, error) {
	type node struct {
		Node     string            `json:"node"`
		Services []json.RawMessage `json:"services"`
	}
	nodes := []node{}
	for _, one := range r.List {
		n := node{one.Agent.Node, []json.RawMessage{}}
		for _, s := range one.Value {
			text, err := nodeclient.JSON(s)
			if err != nil {
				return nil, err
			}
			n.Services = append(n.Services, text)
		}
		nodes = append(nodes, n)
	}
	return json.Marshal(map[string]any{"nodes": nodes, "complete": r.Complete})
}

// sameLine is what nodes have in common whose ports of Services are one line.
type sameLine struct{ namespace, name, port, addresses, endpoints, by, health, problems string }

func (l sameLine) compare(other sameLine) int {
	return cmp.Or(strings.Compare(l.namespace, other.namespace), strings.Compare(l.name, other.name))
}

// Write prints a line for each port of a Service, with the nodes that have it alike.
func (r nodesResult) Write(w io.Writer) error {
	p := pages.Of(w)
	t := pages.NewTable(pages.Column{Name: "NAMESPACE", Least: 8, Cut: true}, pages.Column{Name: "NAME", Least: 12, Cut: true},
		pages.Text("PORT"), pages.Text("ADDRESS").Shrinks(16), pages.Number("ENDPOINTS"), pages.Text("BY").Shrinks(6),
		pages.Text("HEALTH").Shrinks(10), pages.Text("PROBLEM").Shrinks(16), pages.Text("NODES").Shrinks(12))
	on := map[sameLine][]string{}
	var order []sameLine
	services, troubled := map[string]bool{}, map[string]bool{}
	for _, one := range r.List {
		for _, s := range one.Value {
			name := s.Namespace + "/" + s.Name
			services[name] = true
			faults := nodeclient.Faults(s.Findings)
			troubled[name] = troubled[name] || len(faults) > 0
			for _, port := range ofBothFamilies(s.Ports) {
				line := sameLine{s.Namespace, s.Name, portText(port), addresses(port), fmt.Sprint(port.EndpointCount), by(port),
					health(s, port, faults), causes(s, port)}
				if on[line] == nil {
					order = append(order, line)
				}
				on[line] = append(on[line], one.Agent.Node)
				troubled[name] = troubled[name] || line.problems != ""
			}
		}
	}
	slices.SortStableFunc(order, sameLine.compare)
	for _, l := range order {
		t.Row(l.namespace, l.name, l.port, l.addresses, l.endpoints, l.by, l.health, orNone(l.problems), reach.Names(on[l], len(r.List), p.Wide))
	}
	bad := 0
	for _, is := range troubled {
		if is {
			bad++
		}
	}
	nodes := pages.Counted(len(r.List), "node")
	switch {
	case len(services) == 0:
		t.Foot("no such Service is served on %s", nodes)
	case bad > 0:
		t.Verdict(pages.Warning, pages.Counted(len(services), "Service"), "on %s, %d with problems", nodes, bad)
	default:
		t.Foot("%s on %s", pages.Counted(len(services), "Service"), nodes)
	}
	return t.Write(w)
}

// causes are the problems of a Service, and the differences of a port of it.
func causes(s *nodev1alpha1.Service, p *nodev1alpha1.ServicePort) string {
	var list []string
	for _, problem := range s.Problems {
		list = append(list, problem.What)
	}
	return strings.Join(append(list, p.Differences...), "; ")
}
