// Package reach connects commands to the agents of other nodes through the API server. It
// needs nothing but the agents' Pods: "exec" in the Pod starts api-pipe, which copies bytes
// between its standard streams and the Unix socket of the agent's API.
//
//	command ── net.Conn ── exec (WebSocket, SPDY) ── API server ── kubelet ── api-pipe ── api.sock
//
// docs/adr/0047-exec-to-the-agent.md has the reasons.
package reach

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/escape"
)

const (
	// selector finds the agents' Pods, as the chart labels them.
	selector = "app.kubernetes.io/name=spillway"
	// container is the agent's, in its Pod.
	container = "agent"
	// usualNamespace is where the documents install the chart.
	usualNamespace = metav1.NamespaceSystem
	// Command is the hidden command that the agent's container runs for a client.
	Command = "api-pipe"
)

// Texts of commands that ask all nodes.
const (
	// WithoutNodes is about a list of agents that is not complete.
	WithoutNodes = "nodes without an agent are missing: you may not list nodes: bind the ClusterRole spillway-viewer"
	// WithoutAgents is about an empty list of agents.
	WithoutAgents = "the cluster has no Pod with the label " + selector
)

// Config describes a Cluster.
type Config struct {
	REST *rest.Config
	// Namespace is the namespace of the agents' Pods; "": they are found by their label.
	Namespace string
	// OwnNamespace is the namespace of the kubeconfig's context. It is searched if the
	// user may not list the Pods of all namespaces.
	OwnNamespace string
	AtOnce       int           // nodes that are asked, or connected to, at the same time; 0: 10
	Timeout      time.Duration // for a connection, and for each node's answer in Each; 0: 15 s
}

// Cluster reaches the agents of a cluster. Any goroutine may call its methods.
type Cluster struct {
	cfg     Config
	client  kubernetes.Interface
	opening chan struct{}
}

// New returns a Cluster. It sends no request.
func New(cfg Config) (*Cluster, error) {
	cfg.AtOnce = cmp.Or(cfg.AtOnce, 10)
	cfg.Timeout = cmp.Or(cfg.Timeout, 15*time.Second)
	client, err := kubernetes.NewForConfig(cfg.REST)
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	return &Cluster{cfg: cfg, client: client, opening: make(chan struct{}, cfg.AtOnce)}, nil
}

// Agent is the agent of a node.
type Agent struct {
	Node           string
	Namespace, Pod string
	// Err is why the agent cannot be asked: there is none, or it does not run. nil: it runs.
	Err error
}

// Agents returns the agent of every Linux node, sorted by node. Nodes without an agent have
// an Err. If the user may not list nodes, they are missing, and complete is false.
func (c *Cluster) Agents(ctx context.Context) (agents []Agent, complete bool, err error) {
	pods, err := c.pods(ctx, "")
	if err != nil {
		return nil, false, err
	}
	byNode := map[string]Agent{}
	for _, p := range pods {
		if p.Spec.NodeName != "" {
			byNode[p.Spec.NodeName] = Agent{} // choose decides
		}
	}
	for node := range byNode {
		byNode[node] = choose(node, pods)
	}
	nodes, err := c.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: corev1.LabelOSStable + "=linux"})
	switch {
	case apierrors.IsForbidden(err):
	case err != nil:
		return nil, false, fmt.Errorf("list nodes: %s", escape.OneLine(err))
	default:
		complete = true
		for i := range nodes.Items {
			if name := nodes.Items[i].Name; byNode[name].Node == "" {
				byNode[name] = choose(name, nil)
			}
		}
	}
	for _, a := range byNode {
		agents = append(agents, a)
	}
	slices.SortFunc(agents, func(a, b Agent) int { return cmp.Compare(a.Node, b.Node) })
	return agents, complete, nil
}

// Agent returns the agent of one node; its Err is nil.
func (c *Cluster) Agent(ctx context.Context, node string) (Agent, error) {
	pods, err := c.pods(ctx, node)
	if err != nil {
		return Agent{}, err
	}
	a := choose(node, pods)
	if a.Err == nil {
		return a, nil
	}
	if _, err := c.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); apierrors.IsNotFound(err) {
		return Agent{}, &Error{NoAgent, fmt.Sprintf("the cluster has no node %q: see 'kubectl get nodes'", escape.Text(node))}
	}
	return Agent{}, a.Err
}

// pods lists the agents' Pods of a node, or of all nodes for "".
func (c *Cluster) pods(ctx context.Context, node string) ([]corev1.Pod, error) {
	namespaces := []string{c.cfg.Namespace}
	if c.cfg.Namespace == metav1.NamespaceAll {
		// The viewer's rights end at the agents' namespace.
		namespaces = append(namespaces, c.cfg.OwnNamespace, usualNamespace)
	}
	options := metav1.ListOptions{LabelSelector: selector}
	if node != "" {
		options.FieldSelector = "spec.nodeName=" + node
	}
	var forbidden error
	for i, ns := range namespaces {
		if i > 0 && (ns == "" || slices.Contains(namespaces[:i], ns)) {
			continue
		}
		list, err := c.client.CoreV1().Pods(ns).List(ctx, options)
		switch {
		case apierrors.IsForbidden(err):
			forbidden = err
		case err != nil:
			return nil, fmt.Errorf("list the agents' Pods: %s", escape.OneLine(err))
		case len(list.Items) > 0 || i == 0:
			return list.Items, nil
		}
	}
	if forbidden != nil && c.cfg.Namespace != "" {
		return nil, &Error{Forbidden, fmt.Sprintf("you may not list pods in namespace %s, where the agents run: bind the Role spillway-viewer of that namespace", escape.Text(c.cfg.Namespace))}
	}
	return nil, &Error{Forbidden, "you may not list pods in all namespaces, and no agent was found in those that you may: give --agent-namespace, and bind its Role spillway-viewer"}
}

// choose returns the agent of a node among Pods. A restart or an upgrade may leave an older
// Pod for a while.
func choose(node string, pods []corev1.Pod) Agent {
	var best *corev1.Pod
	for i := range pods {
		if p := &pods[i]; p.Spec.NodeName == node && (best == nil || better(p, best)) {
			best = p
		}
	}
	switch {
	case best == nil:
		return Agent{Node: node, Err: &Error{NoAgent, "no agent runs on this node"}}
	case !running(best):
		return Agent{Node: node, Namespace: best.Namespace, Pod: best.Name,
			Err: &Error{NotRunning, fmt.Sprintf("its agent does not run: see 'kubectl -n %s describe pod %s'", best.Namespace, best.Name)}}
	}
	return Agent{Node: node, Namespace: best.Namespace, Pod: best.Name}
}

func better(a, b *corev1.Pod) bool {
	if ra, rb := running(a), running(b); ra != rb {
		return ra
	}
	return b.CreationTimestamp.Before(&a.CreationTimestamp)
}

// running reports whether the agent's container runs. An agent that is not ready may answer.
func running(p *corev1.Pod) bool {
	for _, s := range p.Status.ContainerStatuses {
		if s.Name == container {
			return s.State.Running != nil
		}
	}
	return false
}

// Dialer returns the dialer of a node's agent. The connections last until they are closed,
// whatever happens to the context of the Dial.
func (c *Cluster) Dialer(a Agent) nodeclient.Dialer {
	return nodeclient.Dialer{
		Where: "the agent of node " + escape.Text(a.Node),
		Dial:  func(ctx context.Context) (net.Conn, error) { return c.dial(ctx, a) },
	}
}

// Node returns the dialer of a node's agent by the name of the node. It looks for the Pod
// anew with each connection: it finds the agent again after an upgrade.
func (c *Cluster) Node(name string) nodeclient.Dialer {
	d := c.Dialer(Agent{Node: name})
	d.Dial = func(ctx context.Context) (net.Conn, error) {
		a, err := c.Agent(ctx, name)
		if err != nil {
			return nil, err
		}
		return c.dial(ctx, a)
	}
	return d
}

// dial connects to an agent within the Timeout, after fewer than AtOnce others connect.
func (c *Cluster) dial(ctx context.Context, a Agent) (net.Conn, error) {
	if a.Err != nil {
		return nil, a.Err
	}
	select {
	case c.opening <- struct{}{}:
		defer func() { <-c.opening }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.Timeout, c.noAnswer())
	defer cancel()
	e, err := c.executor(a)
	if err != nil {
		return nil, fmt.Errorf("prepare exec: %w", err)
	}
	conn, err := open(ctx, e, a)
	var failed *Error
	if errors.As(err, &failed) && failed.Reason == Failed {
		// What the kubelet says of a container that has just ended is no help.
		if now, lookErr := c.Agent(ctx, a.Node); errors.As(lookErr, &failed) {
			return nil, failed
		} else if lookErr == nil && now.Pod != a.Pod {
			return nil, &Error{NotRunning, "its agent was replaced a moment ago: try again"}
		}
	}
	return conn, err
}

func (c *Cluster) noAnswer() error {
	return &Error{NoAnswer, fmt.Sprintf("the node does not answer within %s", c.cfg.Timeout)}
}
