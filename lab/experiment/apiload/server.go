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

	"spillway.dev/spillway/test/testbed/controlplane"
)

// server reads what the kernel knows of the API server's process.
type server struct{ plane *controlplane.ControlPlane }

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
