package controlplane

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/client-go/kubernetes"
)

// sample is one line of /metrics.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

func (c *ControlPlane) metrics(ctx context.Context) ([]sample, error) {
	k, err := kubernetes.NewForConfig(c.REST())
	if err != nil {
		return nil, fmt.Errorf("open client: %w", err)
	}
	text, err := k.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("read metrics of the API server: %w", err)
	}
	var out []sample
	for line := range bytes.Lines(text) {
		if one, ok := parseSample(strings.TrimSpace(string(line))); ok {
			out = append(out, one)
		}
	}
	return out, nil
}

// parseSample parses a line. The values of the API server's labels that matter here have
// no quotes and no commas.
func parseSample(line string) (s sample, ok bool) {
	if line == "" || line[0] == '#' {
		return s, false
	}
	head, value, ok := strings.Cut(line, "} ")
	if !ok {
		return s, false
	}
	s.value, _ = strconv.ParseFloat(value, 64)
	s.name, head, _ = strings.Cut(head, "{")
	s.labels = map[string]string{}
	for label := range strings.SplitSeq(head, ",") {
		name, quoted, _ := strings.Cut(label, "=")
		s.labels[name] = strings.Trim(quoted, `"`)
	}
	return s, true
}

// Watches returns the open watches of each resource, as the API server counts them: its
// own and those of all clients.
func (c *ControlPlane) Watches(ctx context.Context) (map[string]int, error) {
	all, err := c.metrics(ctx)
	out := map[string]int{}
	for _, m := range all {
		if m.name == "apiserver_longrunning_requests" && m.labels["verb"] == "WATCH" && m.value != 0 {
			out[m.labels["resource"]] += int(m.value)
		}
	}
	return out, err
}
