package suite

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
)

// appliedWithin bounds the wait for an agent to serve what was written. It only ends
// tests that hang: on a busy machine, the first load, that of all cases at once, has
// taken a minute.
const appliedWithin = 3 * time.Minute

// Loader gives cases their addresses and manifest files.
type Loader struct {
	c       *cluster.Cluster
	numbers flows.Numbers
	files   int
	mu      sync.Mutex // over numbers: cases run at once
}

// NewLoader makes a loader for a cluster.
func NewLoader(c *cluster.Cluster) *Loader { return &Loader{c: c} }

// File is the manifest file of one case, the same on every node. Its objects
// become visible together, and with them a canary: a Service whose port number
// says which version of the file is served.
type File struct {
	Scope   *flows.Scope
	l       *Loader
	name    string
	gen     int32
	wrote   time.Time
	objects []flows.Object // as last written
}

// NewFile makes a file with a namespace and addresses of its own.
func (l *Loader) NewFile() *File {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.files++
	ns := fmt.Sprintf("case-%03d", l.files)
	return &File{Scope: flows.NewScope(ns, l.c, &l.numbers), l: l, name: ns + ".yaml"}
}

const canaryPort = 1000

// canary is the Service that tells which version of a file is served. Its name
// sorts behind all others of the namespace. An agent that serves only labeled
// Services must serve it, too, so there is one of each.
func (f *File) canary(node string) flows.Service {
	name := "zz-canary"
	proxy := f.l.proxyName(node)
	if proxy != "" {
		name += "-" + proxy
	}
	return flows.Service{
		Name: name, ProxyName: proxy, Families: f.l.families(),
		// Not served before both its Service and its slices are of this version.
		Ports:     []flows.Port{{Name: fmt.Sprintf("tcp-%d", f.gen), Protocol: corev1.ProtocolTCP, Port: canaryPort + f.gen, Target: 8080}},
		Endpoints: flows.On("a0"),
	}
}

// families are the IP families of the cluster, as a Service names them.
func (l *Loader) families() string {
	switch {
	case !l.c.Addr("a", true).IsValid():
		return "4"
	case !l.c.Addr("a", false).IsValid():
		return "6"
	}
	return ""
}

// proxyName is the --service-proxy-name of a node's agent.
func (l *Loader) proxyName(node string) string {
	for _, flag := range append(l.c.Flags[""], l.c.Flags[node]...) {
		if name, ok := strings.CutPrefix(flag, "--service-proxy-name="); ok {
			return name
		}
	}
	return ""
}

// Write puts objects, and a canary, in the place of what the file held before.
func (f *File) Write(objects []flows.Object) error {
	f.gen++
	f.wrote, f.objects = time.Now(), objects
	if f.l.c.API != nil {
		return f.apply(objects)
	}
	for _, node := range f.l.c.Nodes() {
		text, err := f.render(append(append([]flows.Object{}, objects...), f.canary(node)))
		if err != nil {
			return err
		}
		if err := f.l.c.Agent(node).Write(f.name, text); err != nil {
			return err
		}
	}
	return nil
}

// apply writes the same to the API server: the canaries of all nodes, and behind
// everything else, since a watch delivers the changes of one kind in order.
func (f *File) apply(objects []flows.Object) error {
	canaries := map[string]flows.Object{}
	for _, node := range f.l.c.Nodes() {
		c := f.canary(node)
		canaries[c.Name] = c
	}
	f.l.mu.Lock()
	list, last := f.Scope.Objects(objects), f.Scope.Objects(slices.Collect(maps.Values(canaries)))
	f.l.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), appliedWithin)
	defer cancel()
	return f.l.c.API.Apply(ctx, f.Scope.Namespace, list, last)
}

func (f *File) render(objects []flows.Object) ([]byte, error) {
	f.l.mu.Lock()
	defer f.l.mu.Unlock()
	return f.Scope.YAML(objects)
}

// Remove takes the file away.
func (f *File) Remove() error {
	if f.l.c.API != nil {
		return f.l.c.API.Apply(context.Background(), f.Scope.Namespace, nil, nil)
	}
	for _, node := range f.l.c.Nodes() {
		if err := f.l.c.Agent(node).Write(f.name, nil); err != nil {
			return err
		}
	}
	return nil
}

// Wait waits until every node serves the file as it was last written.
func (f *File) Wait(ctx context.Context) error {
	return f.WaitOn(ctx, f.l.c.Nodes()...)
}

// WaitOn is Wait for some of the nodes.
func (f *File) WaitOn(ctx context.Context, nodes ...string) error {
	ctx, cancel := context.WithTimeout(ctx, appliedWithin)
	defer cancel()
	for _, node := range nodes {
		if err := f.waitCanary(ctx, node); err != nil {
			return err
		}
	}
	return nil
}

// firstPatience and lastPatience limit a question for a canary. What is not served yet
// should be asked for again soon, but on a busy machine an answer takes longer.
const firstPatience, lastPatience = 200 * time.Millisecond, 3 * time.Second

// answers asks for an address once.
func answers(ctx context.Context, p *probe.Process, dst string, patience time.Duration) bool {
	resp, err := p.Do(ctx, probe.Request{Op: probe.Try, Proto: "tcp", Dst: dst, TimeoutMS: int(patience / time.Millisecond)})
	return err == nil && resp.Answers[0].Err == probe.OK
}

// waitCanary asks for the canary from a node until it answers, in all its
// families, which a dataplane may write one after the other. The sync that
// brought it must also be over: the metrics say when the last one ended.
func (f *File) waitCanary(ctx context.Context, node string) error {
	p, err := f.l.c.Probe(node)
	if err != nil {
		return err
	}
	agent := f.l.c.Agent(node)
	canary := f.canary(node)
	var dsts []string
	for _, c := range flows.TCP {
		if canary.Families == "4" && c.IPv6() || canary.Families == "6" && !c.IPv6() {
			continue
		}
		dst, err := f.address(flows.ClusterIP.Of(canary.Name), []flows.Service{canary}, c)
		if err != nil {
			return err
		}
		dsts = append(dsts, dst)
	}
	var answered time.Time
	for patience := firstPatience; ; patience = min(2*patience, lastPatience) {
		for len(dsts) > 0 && answers(ctx, p, dsts[0], patience) {
			dsts, answered = dsts[1:], time.Now()
		}
		if len(dsts) == 0 && f.synced(ctx, agent, answered) {
			return nil
		}
		if err := agent.Ended(); err != nil {
			return err
		}
		if sleep(ctx, 10*time.Millisecond); ctx.Err() != nil {
			return fmt.Errorf("wait for agent on %s: %s is not served %v after it was written; its log ends with:\n%s",
				node, f.name, time.Since(f.wrote).Round(time.Second), agent.Tail())
		}
	}
}

// synced tells whether the sync has ended that brought the canary, which
// answered at the given time. Either a sync ended after that, or none is under
// way.
func (f *File) synced(ctx context.Context, agent *cluster.Agent, answered time.Time) bool {
	at, err := agent.LastSync(ctx)
	if err != nil || at.Before(f.wrote) {
		return false
	}
	if at.After(answered) {
		return true
	}
	pending, err := agent.Pending(ctx)
	return err == nil && pending == 0
}

// address resolves a target of the file's scope.
func (f *File) address(to flows.Target, services []flows.Service, c flows.Combo) (string, error) {
	f.l.mu.Lock()
	defer f.l.mu.Unlock()
	addr, err := f.Scope.Address(to, services, c)
	if err == nil && !addr.Addr().IsValid() {
		err = fmt.Errorf("resolve target: %s has no address for %s", to, c)
	}
	return addr.String(), err
}

// Address resolves a target among the objects that the file holds.
func (f *File) Address(to flows.Target, c flows.Combo) (string, error) {
	return f.address(to, flows.ServicesOf(f.objects), c)
}

// Load writes objects into a new file and waits until every node serves it.
func (l *Loader) Load(t testing.TB, objects ...flows.Object) *File {
	t.Helper()
	f := l.NewFile()
	f.MustWrite(t, objects...)
	f.MustWait(t)
	return f
}

// MustWrite is Write for a test.
func (f *File) MustWrite(t testing.TB, objects ...flows.Object) {
	t.Helper()
	if err := f.Write(objects); err != nil {
		t.Fatal(err)
	}
}

// MustWait is Wait for a test.
func (f *File) MustWait(t testing.TB) {
	t.Helper()
	if err := f.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// MustAddress is Address for a test.
func (f *File) MustAddress(t testing.TB, to flows.Target, c flows.Combo) string {
	t.Helper()
	text, err := f.Address(to, c)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
