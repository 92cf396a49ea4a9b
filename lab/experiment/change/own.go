package change

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// own is a side that a process of Spillway writes to; see Side.
type own struct {
	harness *harness.Harness
	cmd     *topology.Cmd
	ask     io.WriteCloser
	answers *json.Decoder
	errors  strings.Builder
	first   Cold
}

func newOwn(ctx context.Context, cfg Config, r *harness.Harness, mode string, services int) (*own, error) {
	s := &own{harness: r}
	if err := s.start(ctx, cfg, mode, services); err != nil {
		return nil, errors.Join(err, s.down())
	}
	return s, nil
}

func (s *own) start(ctx context.Context, cfg Config, mode string, services int) error {
	node, pod := s.harness.Cluster.Node(0), s.harness.Cluster.Pod(0, 0)
	bpffs := s.harness.Path("bpf/" + node.Name)
	if err := os.MkdirAll(bpffs, 0o700); err != nil {
		return fmt.Errorf("make directory for pinned objects: %w", err)
	}
	s.cmd = node.Command(ctx, s.harness.Program, "bench", "sync-side", "--proxy-mode", mode,
		"--services", strconv.Itoa(services), "--changes", strconv.Itoa(cfg.Changes),
		"--hostname-override", node.Name, "--pod", pod.IPv4.String(), "--bpffs", bpffs, "--cgroup-root", node.CgroupRoot)
	s.cmd.Stderr = &s.errors
	s.cmd.WaitDelay = time.Second
	var err error
	if s.ask, err = s.cmd.StdinPipe(); err != nil {
		return fmt.Errorf("open pipe: %w", err)
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("open pipe: %w", err)
	}
	s.answers = json.NewDecoder(bufio.NewReader(out))
	if err := s.cmd.Start(); err != nil {
		return err
	}
	if err := s.answers.Decode(&s.first); err != nil {
		return s.failed(err)
	}
	return nil
}

func (s *own) cold() Cold             { return s.first }
func (s *own) host() *harness.Harness { return s.harness }

func (s *own) change(context.Context) (b Batch, err error) {
	if _, err := fmt.Fprintln(s.ask); err != nil {
		return b, s.failed(err)
	}
	if err := s.answers.Decode(&b); err != nil {
		return b, s.failed(err)
	}
	return b, nil
}

// failed returns the reason why a process does not answer, in its own words if possible.
func (s *own) failed(err error) error {
	s.ask.Close()
	if end := s.cmd.Wait(); end != nil {
		err = end
	}
	if words := strings.TrimSpace(s.errors.String()); words != "" {
		return fmt.Errorf("%w: %s", err, words[strings.LastIndexByte(words, '\n')+1:])
	}
	return err
}

func (s *own) down() error {
	if s.ask != nil {
		s.ask.Close()
	}
	if s.cmd != nil && s.cmd.Process != nil && s.cmd.ProcessState == nil {
		_ = s.cmd.Wait() // it ends with its input; the cluster's Down kills it otherwise
	}
	return s.harness.Down()
}
