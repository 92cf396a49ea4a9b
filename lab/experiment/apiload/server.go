package apiload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"spillway.dev/spillway/test/testbed/controlplane"
)

// server reads what the API server says of itself, and what the kernel says of it.
type server struct {
	plane *controlplane.ControlPlane
	rest  rest.Interface
}

func newServer(plane *controlplane.ControlPlane) (*server, error) {
	k, err := kubernetes.NewForConfig(plane.REST())
	if err != nil {
		return nil, fmt.Errorf("open client: %w", err)
	}
	return &server{plane: plane, rest: k.Discovery().RESTClient()}, nil
}

// sample is one line of /metrics.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

func (s *server) metrics(ctx context.Context) ([]sample, error) {
	text, err := s.rest.Get().AbsPath("/metrics").DoRaw(ctx)
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
func Watches(ctx context.Context, plane *controlplane.ControlPlane) (map[string]int, error) {
	s, err := newServer(plane)
	if err != nil {
		return nil, err
	}
	return s.watches(ctx)
}

// watches is Watches.
func (s *server) watches(ctx context.Context) (map[string]int, error) {
	all, err := s.metrics(ctx)
	out := map[string]int{}
	for _, m := range all {
		if m.name == "apiserver_longrunning_requests" && m.labels["verb"] == "WATCH" && m.value != 0 {
			out[m.labels["resource"]] += int(m.value)
		}
	}
	return out, err
}

// id returns the API server's process.
func (s *server) id() (int, error) {
	for _, id := range s.plane.Processes() {
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", id))
		if err == nil && strings.TrimSpace(string(name)) == "kube-apiserver" {
			return id, nil
		}
	}
	return 0, errors.New("find kube-apiserver: it does not run")
}

// cpu returns the CPU time that the API server has used, in seconds (proc(5): utime and
// stime in hundredths of a second).
func (s *server) cpu() (float64, error) {
	id, err := s.id()
	if err != nil {
		return 0, err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", id))
	if err != nil {
		return 0, fmt.Errorf("read CPU time of the API server: %w", err)
	}
	total := 0.0
	for _, f := range strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))[11:13] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, fmt.Errorf("read CPU time of the API server: %w", err)
		}
		total += n / 100
	}
	return total, nil
}

// memory returns the API server's resident memory and its peak since forget, in MiB.
func (s *server) memory() (now, peak float64, err error) {
	id, err := s.id()
	if err != nil {
		return 0, 0, err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", id))
	if err != nil {
		return 0, 0, fmt.Errorf("read memory of the API server: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		kib, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		switch name {
		case "VmRSS":
			now = kib / 1024
		case "VmHWM":
			peak = kib / 1024
		}
	}
	return now, peak, nil
}

// forget makes the current resident memory the peak (proc(5), clear_refs).
func (s *server) forget() error {
	id, err := s.id()
	if err != nil {
		return err
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", id), []byte("5"), 0); err != nil {
		return fmt.Errorf("reset peak memory of the API server: %w", err)
	}
	return nil
}

// until repeats a check until it passes or ctx ends.
func until(ctx context.Context, what string, check func() (bool, error)) error {
	for {
		ok, err := check()
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}
