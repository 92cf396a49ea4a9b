package ui

import (
	"context"
	"errors"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/observe/web"
)

// remote has the nodes whose agents are reached through the API server.
type remote struct {
	cluster *reach.Cluster
	timeout time.Duration
}

// list returns all nodes, and what the list lacks.
func (r remote) list(ctx context.Context) (nodes []web.Node, lacks string, err error) {
	agents, complete, err := r.cluster.Agents(ctx)
	if err != nil {
		return nil, "", err
	}
	if len(agents) == 0 {
		return nil, "", errors.New(reach.WithoutAgents)
	}
	for _, a := range agents {
		nodes = append(nodes, r.node(a, r.cluster.Dialer(a)))
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
