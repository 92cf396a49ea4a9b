package e2e

import (
	"fmt"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

func TestMain(m *testing.M) { harness.Main(m, 3) }

// env is a cluster with running agents.
type env struct {
	*harness.Harness
	canary  *suite.File // of writeAll
	streams []stream
	story   *story // nil: none is printed
}

// start builds a cluster of two nodes with an agent on each.
func start(t *testing.T, name string) *env {
	t.Helper()
	return startSpec(t, topology.DefaultSpec(name))
}

// startSpec builds a cluster. It makes the test parallel: agents and tests mostly wait.
func startSpec(t *testing.T, spec topology.Spec, flags ...string) *env {
	t.Helper()
	t.Parallel()
	return &env{Harness: harness.Start(t, cluster.Config{Spec: spec, Flags: map[string][]string{"": flags}})}
}

// nodePort is a Service with endpoints.
func nodePort(endpoints ...string) flows.Object {
	return flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On(endpoints...)}
}

// patienceMS limits a question that must be answered or refused: on a busy machine an
// answer has taken 1.5 s. silenceMS is how long nothing must come back.
const patienceMS, silenceMS = 10_000, 1000

// ask asks an address a few times. It must answer or refuse.
func ask(t *testing.T, p *probe.Process, dst string, combo flows.Combo, tries int) []probe.Answer {
	return askFor(t, p, dst, combo, tries, patienceMS)
}

// askOnce asks an address once, in vain unless answers is true.
func askOnce(t *testing.T, p *probe.Process, dst string, combo flows.Combo, answers bool) []probe.Answer {
	if answers {
		return ask(t, p, dst, combo, 1)
	}
	return askFor(t, p, dst, combo, 1, silenceMS)
}

func askFor(t *testing.T, p *probe.Process, dst string, combo flows.Combo, tries, timeoutMS int) []probe.Answer {
	resp, err := p.Do(t.Context(), probe.Request{
		Op: probe.Try, Proto: combo.Protocol(), Dst: dst, Tries: tries, TimeoutMS: timeoutMS,
	})
	if err != nil {
		t.Error(err)
	}
	return resp.Answers
}

// askers are the usual clients and what they ask.
var askers = []flows.Flow{
	{From: "a1", To: flows.ClusterIP},
	{From: "a1/vm", To: flows.ClusterIP},
	{From: "b", To: flows.ClusterIP},
	{From: "client0", To: flows.NodePort("a")},
	{From: "client0", To: flows.NodePort("b")},
}

// expect asks from everywhere and wants every answer to come from server; ""
// wants none.
func (e *env) expect(t *testing.T, when string, s *suite.File, server string) {
	t.Helper()
	tries, timeoutMS := 4, patienceMS
	if server == "" {
		tries, timeoutMS = 1, silenceMS // one silence is enough, and slow
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, f := range askers {
		for _, combo := range flows.AllCombos {
			p, dst := e.MustProbe(t, f.From), s.MustAddress(t, f.To, combo)
			wg.Go(func() {
				for _, a := range askFor(t, p, dst, combo, tries, timeoutMS) {
					if a.Server != server {
						t.Errorf("%s: %s to %s, %s: answer %+v, want server %q", when, f.From, f.To, combo, a, server)
						return
					}
				}
			})
		}
	}
}

// stream is a running stream of questions.
type stream struct {
	name  string
	probe *probe.Process
}

// startStreams starts every kind of stream from every asker.
func (e *env) startStreams(t *testing.T, s *suite.File) {
	t.Helper()
	for _, f := range askers {
		p := e.MustProbe(t, f.From)
		for _, combo := range flows.AllCombos {
			for _, proto := range []string{combo.Protocol(), "new-" + combo.Protocol()} {
				st := stream{fmt.Sprintf("%s stream from %s to %s, %s", proto, f.From, f.To, combo), p}
				_, err := p.Do(t.Context(), probe.Request{
					Op: probe.Stream, Name: st.name, Proto: proto, Dst: s.MustAddress(t, f.To, combo), PauseMS: 20,
				})
				if err != nil {
					t.Fatalf("start %s: %v", st.name, err)
				}
				e.streams = append(e.streams, st)
			}
		}
	}
}

// askMore waits until each stream has the results of count more questions.
func (e *env) askMore(t *testing.T, count int) {
	t.Helper()
	askMore(t, e.streams, count)
}

func askMore(t *testing.T, streams []stream, count int) {
	t.Helper()
	sent := func(st stream) int {
		resp, err := st.probe.Do(t.Context(), probe.Request{Op: probe.Peek, Name: st.name})
		if err != nil {
			t.Fatal(err)
		}
		return resp.Report.Sent
	}
	want := make([]int, len(streams))
	for i, st := range streams {
		want[i] = sent(st) + count
	}
	for i, st := range streams {
		await.True(t, st.name+" asks more", func() bool { return sent(st) >= want[i] })
	}
}

// endStreams ends all streams, none of which may have lost anything.
func (e *env) endStreams(t *testing.T) {
	t.Helper()
	sent, late, slowest := 0, 0, 0
	for _, st := range e.streams {
		resp, err := st.probe.Do(t.Context(), probe.Request{Op: probe.Stop, Name: st.name})
		if err != nil {
			t.Fatal(err)
		}
		sent, late, slowest = sent+resp.Report.Sent, late+resp.Report.Late, max(slowest, resp.Report.SlowestMS)
		if r := resp.Report; r.Sent > r.Answered {
			e.story.errorf(t, "%s: %d of %d questions were lost: %v", st.name, r.Sent-r.Answered, r.Sent, r.Lost)
		}
	}
	t.Logf("%d questions in %d streams, %d answers late, the last one after %d ms", sent, len(e.streams), late, slowest)
	e.streams = nil
}
