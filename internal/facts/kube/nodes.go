package kube

import (
	"cmp"
	"context"
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

// NodesConfig selects the Nodes to read. A kubelet writes its Node's status every five
// minutes. If each node watches all Nodes, the API server sends the square of their
// number. So a source watches all Nodes of a small cluster only. In a cluster of more than
// Most it watches its own Node, and reads the others from time to time.
type NodesConfig struct {
	// OwnOnly leaves out the Nodes of other nodes, for dataplanes that do not need them.
	OwnOnly bool
	// WithExternalIPs reads them all the same, as in a large cluster, from the first Service on
	// that has externalIPs: none of these takes an address in a podCIDR.
	WithExternalIPs bool
	// Most is the largest number of Nodes to watch; 0 is 500. It is compared with their
	// number once, at the start.
	Most int
	// Period is the shortest time between two reads of the other Nodes, and half of the
	// longest; 0 is 20 minutes. Random times keep the agents of a cluster apart.
	Period time.Duration
	// Delay is the longest time until a Node is read that an endpoint names and that is
	// not known yet; 0 is 30 seconds.
	Delay time.Duration
}

func (c NodesConfig) withDefaults() NodesConfig {
	c.Most, c.Period, c.Delay = cmp.Or(c.Most, 500), cmp.Or(c.Period, 20*time.Minute), cmp.Or(c.Delay, 30*time.Second)
	return c
}

// Users who write EndpointSlices choose the names in them. So the requests for Nodes that
// they name are limited: newNodesAtOnce in a Delay, and no more after mostAbsent names
// without a Node, until all Nodes are read again.
const (
	nodesPage      = 500
	newNodesAtOnce = 50
	mostUnknown    = 1000
	mostAbsent     = 100
)

// timePerNode keeps an API server from sending more than 10,000 Nodes a second to agents that
// begin to read them for the same reason.
const timePerNode = 100 * time.Microsecond

// requestSeconds bounds a request. An API server without CPU time may never end an answer.
var requestSeconds int64 = 60

// otherNodes holds the Nodes of a cluster that has too many to watch.
type otherNodes struct {
	kind *nodeStore // nil: all Nodes are watched, or only this node's
	// unknown are names that endpoints have and no known Node has. absent are those that
	// the server did not know either, since the last read of all Nodes.
	unknown, absent map[string]bool
	wake            chan struct{} // holds one token when there are unknown names
}

// newNodes returns the store of the Nodes to watch.
func (s *Source) newNodes(name string) *nodeStore {
	return &nodeStore{
		source: s, name: name, resource: "nodes", known: map[model.Name]*model.Node{}, convert: kubeobject.Node, trim: s.trimNode,
		lw:  s.nodesMatching(""),
		put: func(d *model.Delta, n model.Name, m *model.Node) { enter(&d.Nodes, n.Name, m) },
	}
}

// watchNodes watches this node's Node or all Nodes, as NodesConfig says.
func (s *Source) watchNodes() {
	if s.cfg.Nodes.OwnOnly {
		s.watchOwnNode()
		return
	}
	s.wg.Go(func() {
		n, err := s.countNodes(s.ctx)
		if err != nil {
			return // the end of ctx
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if n <= s.cfg.Nodes.Most {
			s.reflect(s.ctx, s.nodes, backoff)
			return
		}
		s.cfg.Logger.Info("the cluster has many Nodes: the other Nodes are read from time to time, not watched", "nodes", n,
			"limit", s.cfg.Nodes.Most)
		s.others.kind = s.newNodes("other Node")
		s.kinds = append(s.kinds, s.others.kind)
		s.watchOwnNode()
		s.wg.Go(func() { s.readNodes(s.ctx) })
	})
}

func (s *Source) watchOwnNode() {
	s.nodes.lw = s.nodesMatching(metav1.ObjectNameField + "=" + s.cfg.NodeName)
	s.reflect(s.ctx, s.nodes, backoff)
}

// noteExternalIPs reads the other Nodes from the first Service with externalIPs on. At the start
// the Full Delta waits for them. Later one object makes all agents of a cluster read, so each
// waits for a random time. The caller holds mu.
func (s *Source) noteExternalIPs(m *model.Service) {
	if m == nil || len(m.ExternalIPs) == 0 || !s.cfg.Nodes.OwnOnly || !s.cfg.Nodes.WithExternalIPs || s.others.kind != nil {
		return
	}
	s.others.kind = s.newNodes("other Node")
	if !s.started {
		s.kinds = append(s.kinds, s.others.kind)
		s.wg.Go(func() { s.readNodes(s.ctx) })
		return
	}
	s.wg.Go(func() {
		n, err := s.countNodes(s.ctx)
		if err != nil {
			return // the end of ctx
		}
		// All n agents read all n Nodes.
		longest := min(time.Duration(n)*time.Duration(n)*timePerNode, s.cfg.Nodes.Period)
		if sleep(s.ctx, rand.N(longest+time.Millisecond)) != nil {
			return
		}
		s.mu.Lock()
		s.kinds = append(s.kinds, s.others.kind)
		s.mu.Unlock()
		s.readNodes(s.ctx)
	})
}

// countNodes returns the number of Nodes. It retries until ctx ends.
func (s *Source) countNodes(ctx context.Context) (n int, err error) {
	for delay := backoff; ; {
		var list *corev1.NodeList
		list, err = s.cfg.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{Limit: 1, TimeoutSeconds: &requestSeconds})
		s.onRequestDone(ctx, s.nodes, "list", err, nil)
		if err == nil {
			n = len(list.Items)
			if more := list.RemainingItemCount; more != nil {
				n += int(*more)
			}
			return n, nil
		}
		if err := sleep(ctx, delay.Step()); err != nil {
			return 0, err
		}
	}
}

// readNodes reads the other Nodes from time to time, until ctx ends.
func (s *Source) readNodes(ctx context.Context) {
	for delay := backoff; ctx.Err() == nil; {
		err := s.readAllNodes(ctx)
		s.onRequestDone(ctx, s.others.kind, "list", err, func() { s.others.kind.watching(false) })
		if err != nil {
			_ = sleep(ctx, delay.Step())
			continue
		}
		delay = backoff
		s.readNewNodes(ctx, wait.Jitter(s.cfg.Nodes.Period, 1))
	}
}

// readAllNodes reads the other Nodes in pages, which take little memory and which the
// server compresses.
func (s *Source) readAllNodes(ctx context.Context) error {
	var all []any
	for o := (metav1.ListOptions{Limit: nodesPage, TimeoutSeconds: &requestSeconds}); ; {
		page, err := s.cfg.Client.CoreV1().Nodes().List(ctx, o)
		if err != nil {
			return err
		}
		for i := range page.Items {
			if n := &page.Items[i]; n.Name != s.cfg.NodeName {
				n.ManagedFields = nil
				s.trimNode(n)
				all = append(all, n)
			}
		}
		if o.Continue = page.Continue; o.Continue == "" {
			break
		}
	}
	s.mu.Lock()
	clear(s.others.absent)
	s.mu.Unlock()
	return s.others.kind.Replace(all, "")
}

// readNewNodes reads Nodes that endpoints name, for a time.
func (s *Source) readNewNodes(ctx context.Context, period time.Duration) {
	end := time.NewTimer(period)
	defer end.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-end.C:
			return
		case <-s.others.wake:
		}
		if err := sleep(ctx, rand.N(s.cfg.Nodes.Delay)); err != nil {
			return
		}
		names := s.takeUnknown()
		for i, name := range names {
			if err := s.readNode(ctx, name); err != nil {
				// The watches report why.
				s.cfg.Logger.Debug("read Node", "node", name, "error", err)
				s.requestNodes(names[i:])
				break
			}
		}
	}
}

// readNode reads a Node. It lists: the agent has no right to get Nodes.
func (s *Source) readNode(ctx context.Context, name string) error {
	list, err := s.cfg.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{
		FieldSelector: metav1.ObjectNameField + "=" + name, ResourceVersion: "0", TimeoutSeconds: &requestSeconds,
	})
	if err != nil {
		return err
	}
	if len(list.Items) == 1 {
		return s.others.kind.Update(&list.Items[0])
	}
	s.noteAbsent(name)
	return nil
}

// noteNodes requests to read the Nodes that a slice names and that are not known. The
// caller holds mu.
func (s *Source) noteNodes(m *model.EndpointSlice) {
	o := &s.others
	if m == nil || o.kind == nil || !o.kind.listed {
		return
	}
	for i := range m.Endpoints {
		if name := m.Endpoints[i].Node; name != "" && name != s.cfg.NodeName && o.kind.known[model.Name{Name: name}] == nil {
			o.request(name)
		}
	}
}

// request requests to read a Node. The caller holds mu of the source.
func (o *otherNodes) request(name string) {
	if o.absent[name] || len(o.absent) >= mostAbsent || len(o.unknown) >= mostUnknown {
		return
	}
	o.unknown[name] = true
	o.wakeUp()
}

func (o *otherNodes) wakeUp() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (s *Source) requestNodes(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		s.others.request(name)
	}
}

// takeUnknown returns some names of Nodes to read.
func (s *Source) takeUnknown() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.others.unknown {
		if len(names) == newNodesAtOnce {
			s.others.wakeUp()
			break
		}
		delete(s.others.unknown, name)
		if s.others.kind.known[model.Name{Name: name}] == nil {
			names = append(names, name)
		}
	}
	return names
}

// noteAbsent records that the server has no Node of this name.
func (s *Source) noteAbsent(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.others.absent[name] = true; len(s.others.absent) >= mostAbsent {
		clear(s.others.unknown)
	}
}

// sleep waits, or returns the error of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
