package suite

import (
	"context"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
)

const (
	// patience is for questions that must be answered or refused.
	patienceMS = 5000
	// silenceMS is how long nothing must come back for a drop.
	silenceMS = 600

	defaultTries = 3
	stickyTries  = 8
	spreadBatch  = 8
	// spreadRounds bounds the tries until all servers have answered: with 4
	// servers, one is missed by chance in 1 of 10^29 runs.
	spreadRounds = 30
)

// runFlow asks one flow for each of its combinations.
func (r *running) runFlow(ctx context.Context, t *testing.T, f flows.Flow) {
	combos := f.Combos(r.objects)
	if len(combos) == 0 {
		t.Fatal("the Service has no port and family for this flow")
	}
	p, err := r.s.Cluster.Probe(f.From)
	if err != nil {
		t.Fatal(err)
	}
	for _, combo := range combos {
		t.Run(string(combo), func(t *testing.T) {
			t.Parallel()
			q := question{r: r, f: f, combo: combo, probe: p}
			if err := q.resolve(); err != nil {
				t.Fatal(err)
			}
			answers, err := q.ask(ctx)
			if err != nil {
				t.Fatal(err)
			}
			r.s.judge(q).report(t, answers)
			if i := slices.IndexFunc(answers, func(a probe.Answer) bool { return a.Err == probe.Timeout }); t.Failed() && i >= 0 {
				r.s.showLosses(ctx, t, answers[i])
			}
		})
	}
}

// question is one flow for one combination.
type question struct {
	r     *running
	f     flows.Flow
	combo flows.Combo
	probe *probe.Process
	dst   string
}

func (q *question) resolve() (err error) {
	q.dst, err = q.r.load.Address(q.f.To, q.combo)
	return err
}

// request builds what the probe is asked.
func (q *question) request() probe.Request {
	req := probe.Request{
		Op: probe.Try, Proto: q.combo.Protocol(), Dst: q.dst, Tries: q.f.Tries, TimeoutMS: patienceMS,
		LocalPort: q.f.LocalPort, SameSocket: q.f.SameSocket, Unconnected: q.f.Unconnected, Mapped: q.f.Mapped,
	}
	// The two probes of a pod share its address. If they also shared ports, an
	// answer to one could look like an answer to the other.
	from := cluster.ParseName(q.f.From)
	req.LowPorts = from.Extra == "vm" || from.IsClient()
	// With DSR replies, an endpoint tells the Services that a client asks by the client's port.
	// And a socket with the port of an earlier one continues its UDP flow, while the endpoint of
	// that one serves.
	req.FreshPorts = from.IsClient() || from.IsPod()
	want := q.f.Want
	if q.f.To.Kind == flows.ToHealthCheck {
		req.Proto = "http"
	}
	if q.f.Keep != "" {
		req.Socket = strings.Join([]string{q.r.load.Scope.Namespace, q.f.Keep, string(q.combo)}, "/")
	}
	if want.Kind == flows.Dropped || want.Kind == flows.NotServed {
		req.TimeoutMS = silenceMS
	}
	if req.Tries > 0 {
		return req
	}
	switch {
	case want.Distinct > 0:
		req.Tries = 1
	case want.Shares != nil:
		req.Tries = sharesTries
	case want.Spread:
		req.Tries = spreadBatch
	case want.Sticky || want.Same || q.f.SameSocket:
		req.Tries = stickyTries
	case want.Kind == flows.Answered && req.Proto != "http":
		req.Tries = defaultTries
	}
	return req
}

// ask asks as often as the flow needs.
func (q *question) ask(ctx context.Context) ([]probe.Answer, error) {
	req := q.request()
	var all []probe.Answer
	for range spreadRounds {
		resp, err := q.probe.Do(ctx, req)
		if err != nil {
			return nil, err
		}
		all = append(all, resp.Answers...)
		if anyFailed(resp.Answers) || enough(q.f.Want, all) {
			break
		}
		sleep(ctx, q.f.Want.Pause)
	}
	return all, nil
}

// enough tells whether more answers could not change the verdict.
func enough(want flows.Want, answers []probe.Answer) bool {
	switch {
	case want.Distinct > 0:
		return len(counts(answers)) >= want.Distinct
	case want.Spread:
		return len(missing(want.From, answers)) == 0
	}
	return true
}

func anyFailed(answers []probe.Answer) bool {
	return slices.ContainsFunc(answers, func(a probe.Answer) bool { return a.Err != probe.OK })
}

// missing lists the servers that have not answered.
func missing(servers []string, answers []probe.Answer) []string {
	return slices.DeleteFunc(slices.Clone(servers), func(s string) bool {
		return slices.ContainsFunc(answers, func(a probe.Answer) bool { return a.Server == s })
	})
}
