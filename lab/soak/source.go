package soak

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/lab/listwatch"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
)

// world is the facts that agents read: a directory for one node, an API server for the
// others.
type world struct {
	nodes    []byte // YAML
	pods     []*topology.Host
	services []*service
	// restricted are the pods that a NetworkPolicy selects, untracked those that a
	// DoNotTrackPolicy selects.
	restricted, untracked []*topology.Host
	version               int32 // the canary's port
	written               time.Time

	dir       string // of the manifests
	api       *listwatch.Server
	host      *topology.Host // of the API server
	server    *http.Server   // nil while it is unavailable
	published map[string]runtime.Object
}

// canary is a Service that is served only if all before it has been read.
func (w *world) canary() *service {
	c := newService("zz-canary", 100, w.pods[0])
	c.ports = []corev1.ServicePort{{Name: fmt.Sprint("tcp-", w.version), Protocol: corev1.ProtocolTCP,
		Port: canaryPort + w.version, TargetPort: intstr.FromInt32(echoPort), NodePort: 31999}}
	return c
}

// objects are all objects that an API server of Kubernetes has.
func (w *world) objects() (list []runtime.Object) {
	for _, p := range w.pods {
		list = append(list, pod(p))
	}
	for _, p := range w.restricted {
		list = append(list, networkPolicy(p))
	}
	for _, s := range append(slices.Clone(w.services), w.canary()) {
		list = append(list, s.objects()...)
	}
	return list
}

// publish writes the facts for all agents, as a new version.
func (w *world) publish() error {
	w.version = (w.version + 1) % 20000
	w.written = time.Now()
	if err := w.publishFile(); err != nil {
		return err
	}
	return w.publishAPI()
}

// manifest returns the facts as one file.
func (w *world) manifest() ([]byte, error) {
	var out bytes.Buffer
	out.Write(w.nodes)
	for _, p := range w.untracked {
		out.WriteString(doNotTrackPolicy(p))
	}
	for _, o := range w.objects() {
		text, err := yaml.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("write manifest: %w", err)
		}
		fmt.Fprintf(&out, "---\n%s", text)
	}
	return out.Bytes(), nil
}

func (w *world) publishFile() error {
	text, err := w.manifest()
	if err != nil {
		return err
	}
	return w.write("soak.yaml", text)
}

// write renames a file into the directory of manifests, so that the agent never reads a
// part of it. Without text it removes the file.
func (w *world) write(name string, text []byte) error {
	path := filepath.Join(w.dir, name)
	if text == nil {
		return os.Remove(path)
	}
	beside := filepath.Join(filepath.Dir(w.dir), name+".new")
	if err := os.WriteFile(beside, text, 0o644); err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	return os.Rename(beside, path)
}

// publishAPI applies the objects that changed. A watch delivers the changes of one kind in order,
// so the canary's come last.
func (w *world) publishAPI() error {
	now := map[string]runtime.Object{}
	for _, o := range w.objects() {
		text, err := yaml.Marshal(o)
		if err != nil {
			return fmt.Errorf("publish object: %w", err)
		}
		now[string(text)] = o
		if w.published[string(text)] == nil {
			if err := w.api.Apply(o); err != nil {
				return err
			}
		}
	}
	names := map[string]bool{}
	for _, o := range now {
		names[identity(o)] = true
	}
	for _, o := range w.published {
		if !names[identity(o)] {
			if err := w.api.Delete(o); err != nil {
				return err
			}
		}
	}
	w.published = now
	return nil
}

func identity(o runtime.Object) string {
	return o.GetObjectKind().GroupVersionKind().Kind + "/" + o.(metav1.Object).GetName()
}

const apiPort = 8080

// newAPI starts the API server with the cluster's nodes and returns a kubeconfig for it.
func (w *world) newAPI(c *topology.Cluster) (kubeconfig []byte, err error) {
	cidr := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}}
	for _, p := range controlplane.DefaultServiceCIDRs {
		cidr.Spec.CIDRs = append(cidr.Spec.CIDRs, p.String())
	}
	cidr.Status.Conditions = []metav1.Condition{{Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue}}
	if w.api, err = listwatch.New(cidr, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		return nil, err
	}
	for _, n := range c.NodeObjects() {
		if err := w.api.Apply(n); err != nil {
			return nil, err
		}
	}
	kubeconfig = fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: "http://%s"}}]
contexts: [{name: lab, context: {cluster: lab}}]
current-context: lab
`, netip.AddrPortFrom(w.host.IPv4, apiPort))
	return kubeconfig, w.startAPI()
}

// startAPI makes the API server available.
func (w *world) startAPI() error {
	l, err := w.host.Listen(context.Background(), "tcp", netip.AddrPortFrom(w.host.IPv4, apiPort).String())
	if err != nil {
		return fmt.Errorf("start API server: %w", err)
	}
	w.server = &http.Server{Handler: w.api, ReadHeaderTimeout: time.Minute}
	go func(s *http.Server) { _ = s.Serve(l) }(w.server) // stopAPI ends it
	return nil
}

// stopAPI closes the API server's port and all connections to it.
func (w *world) stopAPI() error {
	if w.server == nil {
		return nil
	}
	err := w.server.Close()
	w.server = nil
	return err
}

// errNotApplied reports that agents did not apply a change.
var errNotApplied = errors.New("is not served")

// appliedWithin bounds the time for the nodes to serve a change.
const appliedWithin = 60 * time.Second

// applied waits until nodes serve the published version.
func (r *run) applied(ctx context.Context, nodes ...int) error {
	ctx, cancel := context.WithTimeout(ctx, appliedWithin)
	defer cancel()
	for _, n := range nodes {
		for _, v6 := range []bool{false, true} {
			to := netip.AddrPortFrom(r.world.canary().clusterIP(v6), uint16(canaryPort+r.world.version))
			if err := r.answers(ctx, n, to); err != nil {
				return fmt.Errorf("version %d %w on node%d: %w", r.world.version, errNotApplied, n, err)
			}
		}
		answered := time.Now()
		for !r.agents[n].synced(ctx, r.world.written, answered) {
			if ctx.Err() != nil {
				return fmt.Errorf("agent on node%d does not end its sync: %w", n, ctx.Err())
			}
			pause(ctx, 20*time.Millisecond)
		}
	}
	return nil
}

// answers asks a node's client for an address until it answers.
func (r *run) answers(ctx context.Context, node int, to netip.AddrPort) error {
	for {
		r.asked++
		f := flow{Name: fmt.Sprint("canary-", r.asked), Kind: connect, To: to.String(), Patience: time.Second}
		e, err := r.onNode[node].await(ctx, f.Name, order{Once: &f})
		if err == nil && e.Error == "" {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w: %s", ctx.Err(), e.Error)
		}
		if err != nil {
			return err
		}
		pause(ctx, 20*time.Millisecond)
	}
}
