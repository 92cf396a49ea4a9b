// Package agent starts a spillway agent, or kube-proxy, on a host of a cluster and reads
// its health and metrics. Both have the same ports and the same names of metrics.
package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

// Ports of /healthz and /metrics. Each agent has a network namespace of its own, so
// all agents use the same ports.
const (
	HealthPort  = "10256"
	MetricsPort = "10249"
)

// Args returns the arguments with which spillway runs as the agent of a node. Flags for
// the source of Services must follow.
func Args(node *topology.Host, mode, bpffs string) []string {
	return []string{"agent",
		"--proxy-mode", mode,
		"--hostname-override", node.Name,
		"--cgroup-root", node.CgroupRoot,
		"--bpffs", bpffs,
		"--healthz-bind-address", net.JoinHostPort("0.0.0.0", HealthPort),
		"--metrics-bind-address", net.JoinHostPort("127.0.0.1", MetricsPort),
	}
}

// pageWithin limits a request for a page, for an agent that hangs. On a busy machine, a
// page of metrics takes several seconds; a shorter limit would end each attempt.
const pageWithin = 20 * time.Second

// Get fetches a page of the agent from its node's network namespace. A status other than
// 200 is an error.
func Get(ctx context.Context, node *topology.Host, port, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, pageWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:"+port+path, nil)
	if err != nil {
		return "", err
	}
	transport := &http.Transport{DialContext: node.Dial, DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s: %.500s", path, resp.Status, bytes.TrimSpace(body))
	}
	return string(body), err
}

// Metric reads a metric of the agent: the sum of all its series whose labels contain the
// text, "" being all. It is 0 if there are none.
func Metric(ctx context.Context, node *topology.Host, name, labels string) (float64, error) {
	page, err := Get(ctx, node, MetricsPort, "/metrics")
	if err != nil {
		return 0, fmt.Errorf("read metrics of %s: %w", node.Name, err)
	}
	return sum(page, name, labels)
}

func sum(page, name, labels string) (total float64, err error) {
	for line := range strings.Lines(page) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		own, inBraces, _ := strings.Cut(series, "{")
		if !ok || own != name || !strings.Contains(inBraces, labels) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("read metric %s: %w", name, err)
		}
		total += v
	}
	return total, nil
}

// LastSync returns the end of the agent's last sync, zero if there was none.
func LastSync(ctx context.Context, node *topology.Host) (time.Time, error) {
	seconds, err := Metric(ctx, node, "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "")
	if err != nil || seconds == 0 {
		return time.Time{}, err
	}
	return time.Unix(0, int64(seconds*1e9)), nil
}

// Ready returns an error until the agent is healthy and has done its first sync. Its
// health is not enough: like kube-proxy, the agent is healthy from its start.
func Ready(ctx context.Context, node *topology.Host) error {
	if _, err := Get(ctx, node, HealthPort, "/healthz"); err != nil {
		return err
	}
	return Synced(ctx, node)
}

// Synced returns an error until the agent has done its first sync.
func Synced(ctx context.Context, node *topology.Host) error {
	at, err := LastSync(ctx, node)
	if err == nil && at.IsZero() {
		err = errors.New("first sync is not done")
	}
	return err
}
