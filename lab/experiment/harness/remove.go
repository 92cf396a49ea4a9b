package harness

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

func agentName(node *topology.Host) string { return "spillway agent on " + node.Name }

// RemoveAgent ends the agent of a node and removes everything of it from the kernel:
// `spillway agent --cleanup`. mode is that of the agent.
func (h *Harness) RemoveAgent(ctx context.Context, node *topology.Host, mode string) error {
	i := slices.IndexFunc(h.agents, func(p *process) bool { return p.name == agentName(node) })
	if i < 0 {
		return fmt.Errorf("remove agent of %s: none was started", node.Name)
	}
	h.agents[i].signal()
	h.agents[i].wait(5 * time.Second)
	h.agents = slices.Delete(h.agents, i, i+1)
	program, err := Spillway()
	if err != nil {
		return err
	}
	argv := append([]string{program}, agent.Args(node, mode, h.Path("bpf/"+node.Name))...)
	out, err := node.Command(ctx, append(argv, "--cleanup")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("remove agent of %s: %w: %s", node.Name, err, strings.TrimSpace(string(out)))
	}
	return nil
}
