package hostile

import (
	"flag"
	"syscall"
	"testing"
	"time"

	"spillway.dev/spillway/internal/reconcile"
)

// switches change the programs, or the dataplane, that carry running connections.
var switches = []struct {
	name   string
	from   string // --proxy-mode of all nodes
	flags  []string
	before func(t *testing.T, e *env) // before the attacks
	after  func(t *testing.T, e *env) // after the attacks
}{
	{"the programs of the release before are left", "ebpf", []string{"--leave-previous-layout"}, endAgents, stay},
	{"the endpoint's node changes to nftables", "ebpf", nil, to("nftables", "b"), stay},
	{"the endpoint's node changes to iptables", "ebpf", nil, to("iptables", "b"), stay},
	{"the endpoint's node changes to nftables after the attacks", "ebpf", nil, stay, to("nftables", "b")},
	{"nftables changes to ebpf, and the endpoint's node back", "nftables", nil, to("ebpf", "a", "b"), to("nftables", "b")},
	{"iptables changes to ebpf", "iptables", nil, to("ebpf", "a", "b"), stay},
}

func stay(*testing.T, *env) {}

func to(mode string, nodes ...string) func(*testing.T, *env) {
	return func(t *testing.T, e *env) { e.change(t, mode, nodes...) }
}

func endAgents(t *testing.T, e *env) {
	for _, node := range e.Nodes() {
		if err := e.Agent(node).Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
}

// change starts agents with another --proxy-mode, and waits until the rules and programs of
// the dataplane before have been retired.
func (e *env) change(t *testing.T, mode string, nodes ...string) {
	t.Helper()
	e.Modes = map[string]string{}
	for _, node := range nodes {
		e.Modes[node] = mode
		if err := e.Agent(node).Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := e.Agent(node).Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := e.Agent(node).WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(2 * reconcile.Linger)
}

// TestForgedSegmentsAfterASwitch forges segments of connections that are older than the
// programs or rules which carry them. With netfilter, conntrack met some of them in the
// middle, and takes any number for valid.
func TestForgedSegmentsAfterASwitch(t *testing.T) {
	t.Parallel()
	for _, s := range switches {
		if s.from != flag.Lookup("proxy-mode").Value.String() {
			continue // runs with this mode's tests
		}
		t.Run(s.name, func(t *testing.T) {
			e := start(t, "hostile-switch", s.flags...)
			type victim struct {
				*forger
				by forgery
			}
			var victims []victim
			for _, v := range variants {
				for _, by := range forgeries {
					f := e.forger(t, v)
					if v.place == "elsewhere" {
						f.beside = e.sender(t, "b1") // the endpoint's node sees the segments
					}
					victims = append(victims, victim{f, by})
				}
			}
			wantAnswers := func(when string) {
				for _, f := range victims {
					if err := f.victim.ask(); err != nil {
						t.Errorf("%s: %s, %s: %v", when, f.by.name, f.v, err)
					}
				}
			}
			s.before(t, e)
			wantAnswers("before the attacks")
			time.Sleep(challengeInterval)
			silence := time.Second
			for _, f := range victims {
				f.by.attack(f.forger)
				if !testing.Short() {
					silence = max(silence, f.by.silence)
				}
			}
			time.Sleep(silence)
			wantAnswers("after the attacks")
			s.after(t, e)
			wantAnswers("at the end")
			for _, v := range variants {
				if err := e.probe(v, e.nodePort(t, v.place, "tcp", v)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
