package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"time"

	"spillway.dev/spillway/lab/topology"
)

// Ports of /healthz and /metrics. Each agent has a network namespace of its own, so
// all agents use the same ports.
const (
	healthPort  = "10256"
	metricsPort = "10249"
)

// agentArgs returns the command line of the agent of one node.
func (h *Harness) agentArgs(spillway string, node *topology.Host, mode string) []string {
	return []string{spillway, "agent",
		"--hostname-override", node.Name,
		"--proxy-mode", mode,
		"--cgroup-root", node.CgroupRoot,
		"--bpffs", h.Path("bpf/" + node.Name),
		"--healthz-bind-address", "0.0.0.0:" + healthPort,
		"--metrics-bind-address", "127.0.0.1:" + metricsPort,
	}
}

// Agent starts a Spillway agent on a node and waits for its first sync. The health
// endpoint is not enough: like kube-proxy, the agent is healthy from its start. The
// given flags follow the default ones.
func (h *Harness) Agent(ctx context.Context, node *topology.Host, manifests, mode string, flags ...string) error {
	return h.agent(ctx, node, mode, append([]string{"--manifests", manifests}, flags...))
}

// APIAgent is like Agent, but the agent reads objects from an API server.
func (h *Harness) APIAgent(ctx context.Context, node *topology.Host, kubeconfig, mode string, flags ...string) error {
	return h.agent(ctx, node, mode, append([]string{"--kubeconfig", kubeconfig}, flags...))
}

func (h *Harness) agent(ctx context.Context, node *topology.Host, mode string, flags []string) error {
	program, err := Spillway()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(h.Path("bpf/"+node.Name), 0o700); err != nil {
		return fmt.Errorf("make directory for pinned objects: %w", err)
	}
	p, err := start(node, "spillway agent on "+node.Name, append(h.agentArgs(program, node, mode), flags...))
	if err != nil {
		return err
	}
	h.agents = append(h.agents, p)
	return p.until(ctx, "does not serve", 20*time.Second, func(ctx context.Context) error {
		if _, err := ask(ctx, node, healthPort, "/healthz"); err != nil {
			return err
		}
		metrics, err := ask(ctx, node, metricsPort, "/metrics")
		if err != nil {
			return err
		}
		if !synced.MatchString(metrics) {
			return errors.New("first sync is not done")
		}
		return nil
	})
}

// synced matches the metrics of an agent after its first sync: the timestamp is not 0.
var synced = regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds [1-9]`)

// ask gets a page of an agent from its node's network namespace.
func ask(ctx context.Context, node *topology.Host, port, path string) (string, error) {
	client := &http.Client{
		Timeout: time.Second,
		Transport: &http.Transport{
			DialContext:       node.Dial,
			DisableKeepAlives: true,
		},
	}
	url := "http://" + net.JoinHostPort("127.0.0.1", port) + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s says %s: %.500s", path, resp.Status, bytes.TrimSpace(body))
	}
	return string(body), err
}
