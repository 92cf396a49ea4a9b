package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// step is a command of a run: an installation, a check, a build, or go test.
type step struct {
	name string
	// after are the steps that end before this one starts, with success or without.
	after []string
	dir   string // of the command; "" is the repository
	argv  []string
	// tests means that the command prints what go test -json does.
	tests bool
}

// runSteps runs each step as soon as those have ended that it comes after. A failure does
// not stop the others.
func runSteps(ctx context.Context, plan []step, r *report) {
	ended := map[string]chan struct{}{}
	for _, s := range plan {
		ended[s.name] = make(chan struct{})
	}
	var all sync.WaitGroup
	for _, s := range plan {
		all.Go(func() {
			defer close(ended[s.name])
			for _, name := range s.after {
				if done, planned := ended[name]; planned {
					<-done
				}
			}
			s.run(ctx, r)
		})
	}
	all.Wait()
}

// run runs the command and adds its result to the report.
func (s step) run(ctx context.Context, r *report) {
	r.stepBegan(s.name)
	began := time.Now()
	cmd := exec.CommandContext(ctx, s.argv[0], s.argv[1:]...)
	cmd.Dir = s.dir
	cmd.WaitDelay = time.Minute // for what a test has left behind with the pipe
	// An interrupted test ends its agents, and go test does not interrupt it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	var said bytes.Buffer
	cmd.Stderr = &said
	failed, err := false, error(nil)
	if s.tests {
		failed, err = s.runTests(cmd, r)
	} else {
		cmd.Stdout = &said
		err = cmd.Run()
	}
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if err != nil && !failed { // no package explains it
		err = fmt.Errorf("%w\n%s", err, bytes.TrimSpace(said.Bytes()))
	}
	r.stepEnded(s.name, time.Since(began), err, failed)
}

// runTests runs go test -json, and reports whether a package failed.
func (s step) runTests(cmd *exec.Cmd, r *report) (failed bool, err error) {
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return false, err
	}
	failed, err = r.readStage(s.name, out)
	return failed, errors.Join(err, cmd.Wait())
}
