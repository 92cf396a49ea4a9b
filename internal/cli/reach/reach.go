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
	"maps"
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

// Command is the hidden command that the agent's container runs for a client.
const Command = "api-pipe"

// Texts of commands that ask all nodes.
const (
	// WithoutNodes is about a list of agents that is not complete.
	WithoutNodes = "nodes without an agent are missing: you may not list nodes: bind the ClusterRole spillway-viewer"
	// WithoutAgents is about an empty list of agents.
	WithoutAgents = "the agents' DaemonSet has no Pod"
)

// Config describes a Cluster.
type Config struct {
	REST *rest.Config
	// Namespace is the namespace of the agents; "": it is searched.
	Namespace string
	AtOnce    int           // nodes that are asked, or connected to, at the same time; 0: 10
	Timeout   time.Duration // for a connection, and for each node's answer in Each; 0: 15 s
}

// Cluster reaches the agents of a cluster. Any goroutine may call its methods.
type Cluster struct {
	cfg     Config
	client  kubernetes.Interface
	agents  finder
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
	return &Cluster{cfg: cfg, client: client, agents: finder{client: client, given: cfg.Namespace}, opening: make(chan struct{}, cfg.AtOnce)},
		nil
}

// Agent is the agent of a node.
type Agent struct {
	Node           string
	Namespace, Pod string
	// Err is why the agent cannot be asked: there is none, or it does not run. nil: it runs.
	Err error
}

// Pods returns the agents' Pods of all nodes, and those that only look like them.
func (c *Cluster) Pods(ctx context.Context) (*Pods, error) { return c.agents.pods(ctx, "") }

// Agents returns the agent of every Linux node, sorted by node. Nodes without an agent have
// an Err. If the user may not list nodes, they are missing, and complete is false.
func (c *Cluster) Agents(ctx context.Context) (agents []Agent, complete bool, err error) {
	pods, err := c.Pods(ctx)
	if err != nil {
		return nil, false, err
	}
	names := pods.nodes()
	nodes, err := List[*corev1.Node](ctx, metav1.ListOptions{LabelSelector: corev1.LabelOSStable + "=linux"}, c.client.CoreV1().Nodes().List)
	if err != nil && !apierrors.IsForbidden(err) {
		return nil, false, fmt.Errorf("list nodes: %s", escape.OneLine(err))
	}
	for _, n := range nodes {
		names[n.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		agents = append(agents, pods.choose(name))
	}
	return agents, err == nil, nil
}

// Agent returns the agent of one node; its Err is nil.
func (c *Cluster) Agent(ctx context.Context, node string) (Agent, error) {
	pods, err := c.agents.pods(ctx, node)
	if err != nil {
		return Agent{}, err
	}
	a := pods.choose(node)
	if a.Err == nil {
		return a, nil
	}
	return Agent{}, c.orNoNode(ctx, node, a.Err)
}

// orNoNode returns why a node has no agent: it does not exist, or for the other reason.
func (c *Cluster) orNoNode(ctx context.Context, node string, other error) error {
	if _, err := c.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); apierrors.IsNotFound(err) {
		return &Error{NoAgent, fmt.Sprintf("the cluster has no node %q: see 'kubectl get nodes'", escape.Text(node))}
	}
	return other
}

// nodes returns the names of the nodes that have a Pod, also one that is not proven.
func (p *Pods) nodes() map[string]bool {
	names := map[string]bool{}
	for _, pod := range p.Agents {
		names[pod.Spec.NodeName] = true
	}
	for _, u := range p.Unverified {
		names[u.Pod.Spec.NodeName] = true
	}
	delete(names, "") // not scheduled yet
	return names
}

// choose returns the agent of a node. A restart or an upgrade may leave an older Pod for a
// while.
func (p *Pods) choose(node string) Agent {
	var best *corev1.Pod
	for _, pod := range p.Agents {
		if pod.Spec.NodeName == node && (best == nil || better(pod, best)) {
			best = pod
		}
	}
	switch {
	case best == nil:
		for _, u := range p.Unverified {
			if u.Pod.Spec.NodeName == node {
				return Agent{Node: node, Err: u.Err}
			}
		}
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
	e, err := c.executor(a, []string{"spillway", Command})
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
