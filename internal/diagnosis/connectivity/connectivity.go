// Package connectivity tests the Services of a live cluster. Run deploys servers and clients
// as Pods in a namespace of its own, with a Service of each kind, and removes it again.
//
// A client gets its questions as an argument, asks them, writes the results to its log, and
// ends. So the test needs no right to execute anything in a Pod, no connection that stays
// open during the questions, and no Service to work. The servers are package echo:
//
//	echo  answers with the server's name and the client's address
package connectivity

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"
)

// MostNodes is the most Nodes of one test: the questions of a client are one argument.
const MostNodes = 10

// Config configures a test.
type Config struct {
	Client kubernetes.Interface
	// Image has this program as its entry point. It runs on the Nodes' own network.
	Image string
	// Pull is when Image is pulled; "": if a Node does not have it.
	Pull corev1.PullPolicy
	// Nodes are those to test; none are the first ready ones by name.
	Nodes []string
	// MaxNodes is the number of Nodes without Nodes.
	MaxNodes int
	// HostNetwork also starts clients on the Nodes' own network.
	HostNetwork bool
	// Timeout is the time until all results are there. The removal is not part of it.
	Timeout time.Duration
	// Keep leaves the namespace, for a look at it.
	Keep bool
	// Step and Part report progress; nil is silent.
	Step func(format string, args ...any)
	Part func(done, total int)
}

// Validate returns an error that names the invalid field.
func (c Config) Validate() error {
	switch {
	case c.Client == nil:
		return errors.New("no client of the API server")
	case c.Image == "":
		return errors.New("no image")
	case len(c.Nodes) > MostNodes || len(c.Nodes) == 0 && (c.MaxNodes < 1 || c.MaxNodes > MostNodes):
		return fmt.Errorf("number of nodes: must be 1 to %d", MostNodes)
	case c.Timeout <= 0:
		return fmt.Errorf("timeout %v: must be positive", c.Timeout)
	}
	return nil
}

// poll is the time between two looks at Pods.
const poll = 500 * time.Millisecond

// startTimeout is the time that the start of the servers may take, with the pull of an image.
const startTimeout = 2 * time.Minute

// removeTimeout is the time that the removal of the namespace may take.
const removeTimeout = 90 * time.Second

// notRemovedError reports a namespace that the test has left.
type notRemovedError struct {
	Namespace string
	Cause     error
}

func (e *notRemovedError) Error() string {
	return fmt.Sprintf("remove the test's namespace: %v: remove it with 'kubectl delete namespace %s'", e.Cause, e.Namespace)
}

func (e *notRemovedError) Unwrap() error { return e.Cause }

// run is one test.
type run struct {
	Config
	namespace string
	world     world
	clients   []client
	plans     map[string]Plan // by the names of clients
	report    *Report
	// logs reads the log of a Pod; tests replace it.
	logs func(ctx context.Context, pod string) ([]byte, error)
}

// Run carries out a test. It removes its namespace also if it fails, and after ctx has
// ended. The report may be incomplete with an error; it is nil if nothing was tested.
func Run(ctx context.Context, c Config) (*Report, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("test connectivity: %w", err)
	}
	if c.Step == nil {
		c.Step = func(string, ...any) {}
	}
	if c.Part == nil {
		c.Part = func(int, int) {}
	}
	r := &run{Config: c, plans: map[string]Plan{}, report: &Report{}}
	r.logs = r.readLog
	return r.run(ctx)
}

func (r *run) run(ctx context.Context) (*Report, error) {
	if err := r.prepare(ctx); err != nil {
		return nil, err
	}
	err := r.all(ctx)
	if r.Keep {
		r.report.Kept = r.namespace
	} else {
		err = errors.Join(err, r.remove(ctx))
	}
	if r.report.Rows == nil {
		return nil, err
	}
	return r.report, err
}

// prepare reads what the test needs to know, and creates its namespace.
func (r *run) prepare(ctx context.Context) error {
	r.Step("choosing nodes")
	if err := r.chooseNodes(ctx); err != nil {
		return err
	}
	r.report.Image = r.Image
	ns, err := r.Client.CoreV1().Namespaces().Create(ctx, namespaceObject(r.HostNetwork), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create the test's namespace: %w", err)
	}
	r.namespace = ns.Name
	return nil
}

// all carries out the test in its namespace.
func (r *run) all(ctx context.Context) error {
	ctx, stop := context.WithTimeoutCause(ctx, r.Timeout, fmt.Errorf("--timeout %v has passed", r.Timeout))
	defer stop()
	for _, step := range []func(context.Context) error{r.startServers, r.createServices, r.startClients, r.collect} {
		if err := step(ctx); err != nil {
			switch {
			case errors.Is(ctx.Err(), context.Canceled):
				err = fmt.Errorf("test connectivity: %w", context.Cause(ctx))
			case ctx.Err() != nil:
				err = fmt.Errorf("%w: %w", err, context.Cause(ctx))
			}
			return err
		}
	}
	return nil
}

func (r *run) chooseNodes(ctx context.Context) error {
	var nodes []*corev1.Node
	err := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return r.Client.CoreV1().Nodes().List(ctx, o)
	}).EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error {
		nodes = append(nodes, o.(*corev1.Node))
		return nil
	})
	if err != nil {
		return fmt.Errorf("list Nodes: %w", err)
	}
	slices.SortFunc(nodes, func(a, b *corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	known := map[string]bool{}
	for _, n := range nodes {
		known[n.Name] = true
		wanted := slices.Contains(r.Nodes, n.Name)
		if len(r.Nodes) == 0 {
			wanted = usable(n) && len(r.world.targets) < r.MaxNodes
		}
		if !wanted {
			continue
		}
		t := target{node: n.Name, server: serverName(len(r.world.targets))}
		for _, a := range n.Status.Addresses {
			if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
				t.addrs = append(t.addrs, addr)
			}
		}
		r.world.targets = append(r.world.targets, t)
		r.report.Nodes = append(r.report.Nodes, n.Name)
	}
	for _, name := range r.Nodes {
		if !known[name] {
			return fmt.Errorf("choose nodes: the cluster has no Node %q", name)
		}
	}
	if len(r.world.targets) == 0 {
		return errors.New("choose nodes: no Node is ready for Pods")
	}
	return nil
}

// usable reports that a Node takes Pods.
func usable(n *corev1.Node) bool {
	os := n.Labels[corev1.LabelOSStable]
	return !n.Spec.Unschedulable && (os == "" || os == "linux") && slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func (r *run) startServers(ctx context.Context) error {
	r.report.Namespace = r.namespace
	r.Step("starting a server on each of %d nodes, in namespace %s", len(r.world.targets), r.namespace)
	if _, err := r.Client.CoreV1().ServiceAccounts(r.namespace).Create(ctx, serviceAccount(), metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create ServiceAccount: %w", err)
	}
	for _, t := range r.world.targets {
		pod := r.pod(t.server, t.node, roleServer, false, "connectivity", "serve", t.server)
		pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
		if _, err := r.Client.CoreV1().Pods(r.namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create Pod %s: %w", t.server, err)
		}
	}
	ctx, stop := context.WithTimeout(ctx, startTimeout)
	defer stop()
	pods, err := r.waitFor(ctx, roleServer, func(p *corev1.Pod) bool {
		return p.Status.Phase == corev1.PodRunning && len(p.Status.PodIPs) > 0
	})
	if err != nil {
		return fmt.Errorf("start servers: %w", err)
	}
	for i := range r.world.targets {
		r.world.targets[i].podIPs = addresses(pods[r.world.targets[i].server])
	}
	return nil
}

func (r *run) createServices(ctx context.Context) error {
	r.Step("creating Services")
	specs := serviceSpecs()
	for i, t := range r.world.targets {
		specs[t.server] = corev1.ServiceSpec{Selector: map[string]string{nameLabel: t.server}}
		r.clients = append(r.clients, client{name: fmt.Sprintf("client-%d", i), node: i})
		if r.HostNetwork {
			r.clients = append(r.clients, client{name: fmt.Sprintf("host-client-%d", i), node: i, hostNetwork: true})
		}
	}
	for _, c := range r.clients {
		if !c.hostNetwork {
			specs[c.name] = corev1.ServiceSpec{Selector: map[string]string{nameLabel: c.name}}
		}
	}
	r.world.clusterIP, r.world.nodePort = map[string][]netip.Addr{}, map[string]uint16{}
	for _, name := range slices.Sorted(maps.Keys(specs)) {
		s, err := r.Client.CoreV1().Services(r.namespace).Create(ctx, serviceObject(name, specs[name]), metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create Service %s: %w", name, err)
		}
		for _, ip := range s.Spec.ClusterIPs {
			if addr, err := netip.ParseAddr(ip); err == nil {
				r.world.clusterIP[name] = append(r.world.clusterIP[name], addr)
			}
		}
		r.world.nodePort[name] = uint16(s.Spec.Ports[0].NodePort)
	}
	for i, t := range r.world.targets {
		r.world.targets[i].service = r.world.clusterIP[t.server]
	}
	for i, c := range r.clients {
		r.clients[i].service = r.world.clusterIP[c.name]
	}
	return r.setBalancers(ctx)
}

// setBalancers gives the Services the addresses that a load balancer would give. Without the
// right to, its cases are skipped.
func (r *run) setBalancers(ctx context.Context) error {
	for name, addrs := range balancerAddresses {
		patch := balancerPatch(addrs, families(r.world.clusterIP[name]))
		_, err := r.Client.CoreV1().Services(r.namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		if apierrors.IsForbidden(err) {
			for _, c := range []string{loadBalancer, sourceAllowed, sourceExcluded} {
				r.report.skip(c, "no right to patch services/status")
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("set load balancer address of Service %s: %w", name, err)
		}
	}
	r.world.balancers = true
	return nil
}

// startClients starts the clients, and allows the addresses that they get.
func (r *run) startClients(ctx context.Context) error {
	r.Step("starting %d clients", len(r.clients))
	for _, c := range r.clients {
		plan := r.world.plan(c)
		pod := r.pod(c.name, r.world.targets[c.node].node, roleClient, c.hostNetwork, "connectivity", "ask", encode(plan))
		_, err := r.Client.CoreV1().Pods(r.namespace).Create(ctx, pod, metav1.CreateOptions{})
		if c.hostNetwork && apierrors.IsForbidden(err) {
			r.report.HostSkipped = "Pods on the host network are not admitted: " + err.Error()
			r.clients = slices.DeleteFunc(r.clients, func(c client) bool { return c.hostNetwork })
			break
		}
		if err != nil {
			return fmt.Errorf("create Pod %s: %w", c.name, err)
		}
		r.plans[c.name] = plan
	}
	if !r.HostNetwork {
		r.report.HostSkipped = "--host-network=false"
	}
	// One that was created before another was refused.
	r.clients = slices.DeleteFunc(r.clients, func(c client) bool { _, ok := r.plans[c.name]; return !ok })
	if !r.world.balancers {
		return nil
	}
	// A client that does not start must not keep the others waiting; collect reports it.
	waiting, stop := context.WithTimeout(ctx, patientTimeout/2)
	defer stop()
	pods, _ := r.waitFor(waiting, roleClient, func(p *corev1.Pod) bool { return len(p.Status.PodIPs) > 0 || ended(p) })
	if ctx.Err() != nil {
		return nil
	}
	patch := rangesPatch(pods, r.clients)
	_, err := r.Client.CoreV1().Services(r.namespace).Patch(ctx, allowedService, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("set source ranges of Service %s: %w", allowedService, err)
	}
	return nil
}

// remove deletes the namespace and waits until it is gone.
func (r *run) remove(ctx context.Context) error {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer stop()
	r.Step("removing namespace %s; a second Ctrl-C leaves it", r.namespace)
	api := r.Client.CoreV1().Namespaces()
	if err := api.Delete(ctx, r.namespace, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return &notRemovedError{r.namespace, err}
	}
	for {
		_, err := api.Get(ctx, r.namespace, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		select {
		case <-ctx.Done():
			return &notRemovedError{r.namespace, fmt.Errorf("it still exists after %v", removeTimeout)}
		case <-time.After(poll):
		}
	}
}
