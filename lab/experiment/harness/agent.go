package harness

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

// Agent starts a Spillway agent on a node and waits for its first sync. The health
// endpoint is not enough: like kube-proxy, the agent is healthy from its start. The
// given flags follow the default ones.
func (h *Harness) Agent(ctx context.Context, node *topology.Host, manifests, mode string, flags ...string) error {
	return h.agent(ctx, node, mode, append([]string{"--manifests", manifests}, flags...))
}

// APIAgent is like Agent, but the agent reads objects from the server that API started.
func (h *Harness) APIAgent(ctx context.Context, node *topology.Host, mode string, flags ...string) error {
	return h.agent(ctx, node, mode, append([]string{"--kubeconfig", h.kubeconfig}, flags...))
}

// startTime is how long an agent may take to load its programs and to sync: the machine may be
// busy.
const startTime = 2 * time.Minute

func (h *Harness) agent(ctx context.Context, node *topology.Host, mode string, flags []string) error {
	program, err := Spillway()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(h.Path("bpf/"+node.Name), 0o700); err != nil {
		return fmt.Errorf("make directory for pinned objects: %w", err)
	}
	p, err := start(node, agentName(node), slices.Concat([]string{program}, agent.Args(node, mode, h.Path("bpf/"+node.Name)), flags))
	if err != nil {
		return err
	}
	h.agents = append(h.agents, p)
	return p.until(ctx, "does not serve", startTime, func(ctx context.Context) error {
		return agent.Ready(ctx, node)
	})
}
