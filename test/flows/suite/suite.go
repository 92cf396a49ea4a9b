// Package suite runs flow cases on a cluster: it loads their objects, waits
// until every agent serves them, asks the questions and judges the answers.
package suite

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
)

// Suite is a list of cases on a running cluster.
type Suite struct {
	Cluster *cluster.Cluster
	Loader  *Loader

	showing sync.Once
}

// New makes a suite on a cluster.
func New(c *cluster.Cluster) *Suite {
	return &Suite{Cluster: c, Loader: NewLoader(c)}
}

// Run runs cases as subtests of t, all of them at once. The objects of all
// cases are there before the first flow, so every case also shows that it is
// not disturbed by the others.
func (s *Suite) Run(t *testing.T, cases []flows.Case) {
	t.Helper()
	ctx := t.Context()
	var running []*running
	for _, c := range cases {
		if c.FilesOnly != "" && s.Cluster.API != nil {
			continue // it says why
		}
		if c.Modes != nil && slices.ContainsFunc(s.Cluster.Nodes(),
			func(n string) bool { return !slices.Contains(c.Modes, s.Cluster.ModeOf(n)) }) {
			continue // not a skip: the case says nothing about this dataplane
		}
		r := s.start(c)
		if err := r.load.Write(c.Objects); err != nil {
			t.Fatal(err)
		}
		running = append(running, r)
	}
	for _, r := range running {
		t.Run(subtestName(r.c.Name), func(t *testing.T) {
			t.Parallel()
			r.run(ctx, t)
		})
	}
}

// showLosses logs, for the first question that waited in vain, where packets were lost.
func (s *Suite) showLosses(ctx context.Context, t *testing.T, a probe.Answer) {
	s.showing.Do(func() {
		t.Logf("packets were lost here:\n%s", strings.Join(s.Cluster.Losses(ctx), "\n"))
		if client := asker.FindStringSubmatch(a.Detail); client != nil {
			t.Logf("known of %s:\n%s", client[1], strings.Join(s.Cluster.Trail(ctx, client[1]), "\n"))
		}
	})
}

// asker finds the socket in the text of a probe's error.
var asker = regexp.MustCompile(`from (\S+:\d+) at `)

// start gives a case what it needs to run.
func (s *Suite) start(c flows.Case) *running {
	return &running{
		s: s, c: c, load: s.Loader.NewFile(),
		objects: c.Objects, sticky: map[string]string{},
	}
}

// subtestName keeps a sentence readable: go test turns blanks into underscores
// by itself, and a slash would begin another level.
func subtestName(sentence string) string { return strings.ReplaceAll(sentence, "/", "-") }

// running is a case at work.
type running struct {
	s       *Suite
	c       flows.Case
	load    *File
	objects []flows.Object
	sticky  stickyServers
}

func (r *running) run(ctx context.Context, t *testing.T) {
	r.addRules(t)
	steps := append([]flows.Step{{Name: "at first", Objects: nil, Flows: r.c.Flows}}, r.c.Then...)
	for i, step := range steps {
		if step.Objects != nil {
			r.objects = step.Objects
			if err := r.load.Write(step.Objects); err != nil {
				t.Fatal(err)
			}
		}
		if i == 0 || step.Objects != nil {
			if err := r.load.Wait(ctx); err != nil {
				t.Fatal(err)
			}
		}
		name := step.Name
		if name == "" {
			name = fmt.Sprintf("step %d", i)
		}
		if len(step.Flows) == 0 {
			continue
		}
		sleep(ctx, step.Wait)
		t.Run(subtestName(name), func(t *testing.T) { r.runFlows(ctx, t, step.Flows) })
	}
}

// runFlows runs the flows of one step at once, unless they share a socket or
// a stickyServers record.
func (r *running) runFlows(ctx context.Context, t *testing.T, list []flows.Flow) {
	for _, f := range r.withVMs(list) {
		ordered := f.Keep != "" || f.Want.Sticky || f.LocalPort != 0
		t.Run(subtestName(title(f)), func(t *testing.T) {
			if !ordered {
				t.Parallel()
			}
			r.runFlow(ctx, t, f)
		})
	}
}

// withVMs adds to each flow from a pod the same from a process that no socket
// hook sees. The other dataplanes have no socket hooks, so there the second run
// would be the first.
func (r *running) withVMs(list []flows.Flow) []flows.Flow {
	var all []flows.Flow
	for _, f := range list {
		all = append(all, f)
		from := cluster.ParseName(f.From)
		ebpf := r.s.Cluster.ModeOf(r.s.Cluster.NodeOf(f.From)) == "ebpf"
		if ebpf && from.IsPod() && from.Extra == "" && !f.NoVM && f.To.Kind != flows.ToAddress {
			f.From += "/vm"
			all = append(all, f)
		}
	}
	return all
}

// title names a flow in test output.
func title(f flows.Flow) string {
	text := strings.Replace(f.From, "/vm", " as a VM", 1)
	text = strings.Replace(text, "/host", "'s host network", 1) + " to " + f.To.String()
	for _, extra := range []struct {
		on   bool
		text string
	}{
		{f.Unconnected, "unconnected"}, {f.SameSocket, "one socket"}, {f.Mapped, "mapped"},
		{f.Keep != "", "kept socket " + f.Keep}, {f.LocalPort != 0, "one local port"},
	} {
		if extra.on {
			text += ", " + extra.text
		}
	}
	return text
}
