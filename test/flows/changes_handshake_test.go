package flows_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/harness"
)

// patience is the time of a connect() in ms: the client repeats its SYN after 1, 3, 7 and 15 s. One that gets no
// answer while others do has keeperPatience.
const patience, keeperPatience = 25_000, 5_000

// changesAndHandshakes: objects change while an endpoint drops the SYNs of its clients. Where the
// client's next SYN must go to the same endpoint, the endpoint gets one after the change, and answers
// the one after that. Where it must go to another one, or to none, the first endpoint never answers.
// The changes follow each other, because they share the port that the endpoint drops.
func changesAndHandshakes(t *testing.T, h *harness.Harness) {
	for _, c := range flows.HandshakeChanges() {
		t.Run(strings.ReplaceAll(c.Name, " ", "_"), func(t *testing.T) {
			if h.FromAPI && c.FilesOnly != "" {
				t.Skip(c.FilesOnly)
			}
			runHandshakes(t, h, c)
		})
	}
}

// shake is one client in connect().
type shake struct {
	what, dst string
	keeps     bool // the connect hook has translated its address, and nothing replaces the endpoint
	answer    probe.Answer
	err       error
}

func runHandshakes(t *testing.T, h *harness.Harness, c flows.HandshakeChange) {
	file := h.Load(t, c.Before...)
	defer func() {
		if err := file.Remove(); err != nil {
			t.Error(err)
		}
	}()
	dropSYNs(t, h, c.Old)
	defer answerSYNs(t, h, c.Old)
	list := beginShakes(t, h, file, c)
	await.NoError(t, func() error { return heardFrom(t, h, c.Old, len(list.all)) })
	file.MustWrite(t, c.After...)
	file.MustWait(t)
	if c.Stays() {
		forgetSYNs(t, h, c.Old)
		var err error
		await.True(t, "the next SYNs", func() bool {
			err = heardFrom(t, h, c.Old, len(list.all))
			return err == nil || list.ended()
		})
		if err != nil {
			t.Errorf("after the change: %v", err)
		}
		answerSYNs(t, h, c.Old)
	}
	list.wait()
	if c.New == "" {
		// Of the SYN after 7 s nothing is left, and that after 15 s is 10 s old.
		if err := heardFrom(t, h, c.Old, list.keeping()); err != nil {
			t.Errorf("after the change: %v", err)
		}
	}
	for _, one := range list.all {
		one.judge(t, c)
	}
}

func (s *shake) judge(t *testing.T, c flows.HandshakeChange) {
	t.Helper()
	switch {
	case s.err != nil:
		t.Errorf("%s: %v", s.what, s.err)
	case c.New == "" || s.keeps && !c.Stays():
		if s.answer.Err == probe.OK {
			t.Errorf("%s: answer %+v, want none", s.what, s.answer)
		}
	case s.answer.Err != probe.OK || s.answer.Server != c.New || s.answer.Peer != s.dst:
		t.Errorf("%s: answer %+v, want one of %s, and %s as peer", s.what, s.answer, c.New, s.dst)
	}
}

type shakes struct {
	all     []*shake
	waiting sync.WaitGroup
	over    atomic.Int32
}

func (s *shakes) wait() { s.waiting.Wait() }

// keeping is how many ask the former endpoint after any change.
func (s *shakes) keeping() (n int) {
	for _, one := range s.all {
		if one.keeps {
			n++
		}
	}
	return n
}

// ended reports whether all connect() have returned.
func (s *shakes) ended() bool { return int(s.over.Load()) == len(s.all) }

// beginShakes starts the connect() of each client, also of those whose sockets no hook sees.
func beginShakes(t *testing.T, h *harness.Harness, file interface {
	MustAddress(testing.TB, flows.Target, flows.Combo) string
}, c flows.HandshakeChange,
) *shakes {
	t.Helper()
	list := &shakes{}
	for _, f := range c.Flows {
		froms := []string{f.From}
		if cluster.ParseName(f.From).IsPod() && h.ModeOf(h.NodeOf(f.From)) == "ebpf" {
			froms = append(froms, f.From+"/vm")
		}
		for _, from := range froms {
			for _, combo := range f.Only {
				p := h.MustProbe(t, from)
				// No program sees the SYNs of the node's sockets. Those of a pod's go where they went while
				// any Service has the endpoint: docs/reference/features.md.
				isPod := cluster.ParseName(from).IsPod()
				hooked := f.From != "client0" && from == f.From && h.ModeOf(h.NodeOf(f.From)) == "ebpf"
				one := &shake{
					what: fmt.Sprintf("%s to %s/%s", from, f.To, combo), dst: file.MustAddress(t, f.To, combo),
					keeps: hooked && (c.Shared || !isPod),
				}
				timeout := patience
				if one.keeps && c.New != "" && !c.Stays() {
					timeout = keeperPatience
				}
				list.all = append(list.all, one)
				list.waiting.Go(func() {
					defer list.over.Add(1)
					resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: "tcp", Dst: one.dst, TimeoutMS: timeout})
					if one.err = err; err == nil {
						one.answer = resp.Answers[0]
					}
				})
			}
		}
	}
	return list
}

// dropSYNs has a pod drop SYNs to HandshakePort, and remember the sockets that they are from.
func dropSYNs(t *testing.T, h *harness.Harness, pod string) {
	t.Helper()
	h.Output(t, pod, "nft", fmt.Sprintf(`table inet shakes {
	set seen4 { typeof ip saddr . tcp sport; size 1024; flags dynamic, timeout; }
	set seen6 { typeof ip6 saddr . tcp sport; size 1024; flags dynamic, timeout; }
	chain input {
		type filter hook input priority 0;
		tcp dport %d tcp flags & (syn | ack) == syn jump shake
	}
	chain shake {
		meta nfproto ipv4 update @seen4 { ip saddr . tcp sport timeout 14s } drop
		meta nfproto ipv6 update @seen6 { ip6 saddr . tcp sport timeout 14s } drop
	}
}`, flows.HandshakePort))
}

// answerSYNs ends dropSYNs.
func answerSYNs(t *testing.T, h *harness.Harness, pod string) {
	t.Helper()
	h.Output(t, pod, "nft", "add table inet shakes; delete table inet shakes")
}

func forgetSYNs(t *testing.T, h *harness.Harness, pod string) {
	t.Helper()
	h.Output(t, pod, "nft", "flush set inet shakes seen4; flush set inet shakes seen6")
}

// heardFrom returns an error until the pod has dropped a SYN of each of the clients.
func heardFrom(t *testing.T, h *harness.Harness, pod string, clients int) error {
	t.Helper()
	seen := 0
	for _, set := range []string{"seen4", "seen6"} {
		text := h.Output(t, pod, "nft", "list", "set", "inet", "shakes", set)
		if _, elements, ok := strings.Cut(text, "elements = {"); ok {
			seen += strings.Count(elements, ",") + 1
		}
	}
	if seen != clients {
		return fmt.Errorf("%s has dropped SYNs of %d sockets, want %d", pod, seen, clients)
	}
	return nil
}
