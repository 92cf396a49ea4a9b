package rig

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"spillway.dev/spillway/lab/topology"
)

// healthPort is where the agents serve /healthz; each has a network namespace
// of its own, so one port does for all.
const healthPort = "10256"

// agentArgs is the command line of the agent of one node.
func (r *Rig) agentArgs(node *topology.Host, manifests, mode string) []string {
	return []string{r.Program, "agent",
		"--hostname-override", node.Name,
		"--manifests", manifests,
		"--proxy-mode", mode,
		"--cgroup-root", node.CgroupRoot,
		"--bpffs", r.Path("bpf/" + node.Name),
		"--healthz-bind-address", "0.0.0.0:" + healthPort,
		"--metrics-bind-address", "127.0.0.1:10249",
	}
}

// Agent starts a Spillway agent on a node and waits until it is healthy.
func (r *Rig) Agent(ctx context.Context, node *topology.Host, manifests, mode string) error {
	if err := os.MkdirAll(r.Path("bpf/"+node.Name), 0o700); err != nil {
		return fmt.Errorf("make directory for pinned objects: %w", err)
	}
	p, err := start(node, "spillway agent on "+node.Name, r.agentArgs(node, manifests, mode))
	if err != nil {
		return err
	}
	r.agents = append(r.agents, p)
	return p.until(ctx, "is not healthy", 20*time.Second, func(ctx context.Context) error {
		return healthy(ctx, node)
	})
}

// healthy asks an agent's /healthz from inside its node.
func healthy(ctx context.Context, node *topology.Host) error {
	client := &http.Client{
		Timeout: time.Second,
		Transport: &http.Transport{
			DialContext:       node.Dial,
			DisableKeepAlives: true,
		},
	}
	url := "http://" + net.JoinHostPort("127.0.0.1", healthPort) + "/healthz"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return fmt.Errorf("/healthz says %s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return nil
}
