package scripts

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

var update = flag.Bool("update", false, "write the output that the scripts want")

// TestMain runs 16 scripts at once unless -parallel says otherwise: they wait for
// manifests to be read.
func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "16") // the flag exists
	os.Exit(m.Run())
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:           "testdata",
		UpdateScripts: *update,
		Setup: func(env *testscript.Env) error {
			s := &script{dir: env.Getenv("WORK"), dataplane: newRecorder()}
			s.manifests = filepath.Join(s.dir, "manifests")
			env.Values[key{}] = s
			env.Defer(func() {
				if s.agent != nil {
					_ = s.agent.end()
				}
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"services": show(func(s *script) string { return s.dataplane.services() }),
			"changes":  show(func(s *script) string { return s.dataplane.changes() }),
			"policies": show(func(s *script) string { return s.dataplane.policyText() }),
			"node":     show(func(s *script) string { return s.dataplane.nodeText() }),
			"problems": show(func(s *script) (text string) {
				for _, p := range s.agent.loop.Status().Problems {
					text += p.String() + "\n"
				}
				return text
			}),
			"restart": func(ts *testscript.TestScript, _ bool, _ []string) {
				s := of(ts)
				ts.Check(s.agent.end())
				s.agent = nil
			},
		},
	})
}

// show makes a command that prints a text when everything in manifests is written.
func show(text func(*script) string) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, _ bool, args []string) {
		s := synced(ts)
		if !slices.Equal(args, []string{"-held"}) {
			compareWithRestart(ts, s)
		}
		fmt.Fprint(ts.Stdout(), text(s))
	}
}

// script is the state of one script.
type script struct {
	dir, manifests string
	dataplane      *recorder
	agent          *agent // nil before the first command and after restart
	syncs          int
}

type key struct{}

func of(ts *testscript.TestScript) *script { return ts.Value(key{}).(*script) }

// canaryNamespace holds Services that tell when everything before them is written.
const canaryNamespace = "canary"

func canary(n int) intent.PortID {
	return intent.PortID{Service: model.Name{Namespace: canaryNamespace, Name: fmt.Sprint("sync-", n)}, Number: 80,
		Protocol: model.TCP, Family: model.IPv4}
}

func (s *script) canaryFile(n int) string {
	return filepath.Join(s.manifests, fmt.Sprintf("canary-%d.yaml", n))
}

const canaryYAML = `apiVersion: v1
kind: Service
metadata: {namespace: %s, name: sync-%d}
spec: {clusterIP: 10.96.255.%d, ports: [{port: 80}]}
`

// synced waits until the agent has written everything in manifests. A deleted file
// counts after a while, so one canary appears and the one before disappears.
func synced(ts *testscript.TestScript) *script {
	s := of(ts)
	s.syncs++
	text := fmt.Sprintf(canaryYAML, canaryNamespace, s.syncs, s.syncs)
	ts.Check(os.MkdirAll(s.manifests, 0o755))
	ts.Check(os.WriteFile(s.canaryFile(s.syncs), []byte(text), 0o600))
	_ = os.Remove(s.canaryFile(s.syncs - 1))
	if s.agent == nil {
		var err error
		s.agent, err = startAgent(s.manifests, s.dataplane)
		ts.Check(err)
	}
	wait(ts, s.agent, s.dataplane, s.syncs)
	return s
}

// wait waits until a dataplane holds canary n and not the one before.
func wait(ts *testscript.TestScript, a *agent, r *recorder, n int) {
	if err := await.Error(func() error {
		if !r.holds(canary(n)) || r.holds(canary(n-1)) || !a.loop.Status().PendingSince.IsZero() {
			return errors.New("the agent does not write all manifests")
		}
		return nil
	}); err != nil {
		ts.Fatalf("%v; its log:\n%s", err, &a.log)
	}
}

func (r *recorder) holds(id intent.PortID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ports[id] != nil
}

// compareWithRestart fails unless an agent that starts now ends in the same state.
func compareWithRestart(ts *testscript.TestScript, s *script) {
	fresh := newRecorder()
	a, err := startAgent(s.manifests, fresh)
	ts.Check(err)
	wait(ts, a, fresh, s.syncs)
	ts.Check(a.end())
	for _, text := range []func(*recorder) string{(*recorder).serviceText, (*recorder).policyText, (*recorder).nodeText} {
		if got, want := text(fresh), text(s.dataplane); got != want {
			ts.Fatalf("an agent that starts now writes\n%s\ninstead of\n%s", got, want)
		}
	}
}
