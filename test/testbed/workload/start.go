package workload

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

// askVariable is the environment variable that makes an executable with RunIfAsked a
// server or a client.
const askVariable = "SPILLWAY_LAB_WORKLOAD"

// order is the content of askVariable, as JSON: exactly one of the fields.
type order struct {
	Serve *Config   `json:"serve,omitempty"`
	Ask   *Question `json:"ask,omitempty"`
}

// RunIfAsked serves and exits if Start or Ask started the process, else it returns at
// once. Call it at the start of main and of TestMain.
func RunIfAsked() {
	text := os.Getenv(askVariable)
	if text == "" {
		return
	}
	os.Unsetenv(askVariable)
	var o order
	err := json.Unmarshal([]byte(text), &o)
	switch {
	case err != nil:
	case o.Serve != nil:
		err = Main(*o.Serve, os.Stdout)
	case o.Ask != nil:
		err = json.NewEncoder(os.Stdout).Encode(Put(context.Background(), *o.Ask))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// command prepares the calling executable to run again on a host.
func command(ctx context.Context, h *topology.Host, o order) (*topology.Cmd, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the running executable: %w", err)
	}
	text, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("write order: %w", err)
	}
	cmd := h.Command(ctx, exe)
	cmd.Env = append(cmd.Env, askVariable+"="+string(text))
	return cmd, nil
}

// Start starts a server on a host and returns when it listens. The process ends with the
// context, at the latest when the cluster is removed. An empty Name is the host's.
func Start(ctx context.Context, h *topology.Host, c Config) (*topology.Cmd, error) {
	if c.Name == "" {
		c.Name = h.Name
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	cmd, err := command(ctx, h, order{Serve: &c})
	if err != nil {
		return nil, err
	}
	var messages strings.Builder
	cmd.Stderr = &messages
	// SIGTERM, so that nginx ends with its parent.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 2 * time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start %s server: %w", c.Kind, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if strings.TrimSpace(line) == readyLine {
		return cmd, nil
	}
	_ = cmd.Process.Kill()
	err = errors.Join(cmd.Wait(), err)
	return nil, fmt.Errorf("start %s server on %s: not ready: %w: %s", c.Kind, h.Name, err, strings.TrimSpace(messages.String()))
}
