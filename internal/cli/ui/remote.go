package ui

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/observe/web"
)

// remote has the nodes whose agents are reached through the API server.
type remote struct {
	nodes   *reach.Nodes
	timeout time.Duration
}

// chosen returns the nodes of --node. A node that does not exist, or a right that is missing, is
// seen at once.
func (r remote) chosen(ctx context.Context) (list []web.Node, err error) {
	agents, _, err := r.nodes.Agents(ctx)
	if err != nil {
		return nil, fmt.Errorf("find the agents: %w", err)
	}
	for _, a := range agents {
		if a.Err != nil {
			return nil, fmt.Errorf("find the agent of node %s: %w", escape.Text(a.Node), a.Err)
		}
		list = append(list, r.node(a, r.nodes.Node(a.Node)))
	}
	return list, nil
}

// list returns all nodes, and what the list lacks.
func (r remote) list(ctx context.Context) (nodes []web.Node, lacks string, err error) {
	agents, complete, err := r.nodes.Agents(ctx)
	if err != nil {
		return nil, "", err
	}
	if len(agents) == 0 {
		return nil, "", errors.New(reach.WithoutAgents)
	}
	for _, a := range agents {
		nodes = append(nodes, r.node(a, r.nodes.Dialer(a)))
	}
	if !complete {
		lacks = sentence(reach.WithoutNodes)
	}
	return nodes, lacks, nil
}

// node returns the node of an agent. The address changes with the Pod.
func (r remote) node(a reach.Agent, d nodeclient.Dialer) web.Node {
	return web.Node{
		Name: a.Node, Address: a.Namespace + "/" + a.Pod,
		// The timeout of the cluster's own comes first, and says more.
		Dial: d.Dial, DialTime: 2 * r.timeout, OneConnection: true,
		Explain: func(err error) string { return sentence(reach.Explain(context.Background(), err).Error()) },
	}
}

// sentence makes a sentence of a line of an error.
func sentence(line string) string {
	first, size := utf8.DecodeRuneInString(line)
	return string(unicode.ToUpper(first)) + strings.TrimSuffix(line[size:], ".") + "."
}
