// Package kube watches a Kubernetes API server and delivers its objects as model.Deltas,
// of the same kinds that package manifest reads from files.
//
//	list, watch ──> Reflector ──> kindStore (kubeobject: decode, check) ──> Delta
//
// The package stores no API object, only model values, which package store keeps too. The first
// Delta is Full, after every kind has been listed once, so that a restart never removes
// working Services. While the server cannot be reached, the package delivers only a
// problem, and the last state stays in effect.
package kube

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"spillway.dev/spillway/internal/facts/model"
)

// Config configures a Source.
type Config struct {
	Client kubernetes.Interface
	// Server is the address of the API server, for messages.
	Server string
	// NodeName is the Node whose Pods are watched.
	NodeName string
	// ProxyName selects Services by service.kubernetes.io/service-proxy-name:
	// "" selects those without the label, another value only those with it.
	ProxyName string
	// NetworkPolicies makes the source watch them, and the Pods that they may select. If
	// the server forbids either, the source delivers the rest and sets
	// model.Delta.NetworkPoliciesUnknown.
	NetworkPolicies bool
	// NodePods makes the source watch the Pods of this node in any case, for their annotations and host ports.
	NodePods bool
	// DoNotTrack reads DoNotTrackPolicies and, while any exist, the Pods and Namespaces
	// that they select. nil disables them.
	DoNotTrack dynamic.Interface

	Nodes NodesConfig

	// Monitor detects whether the server answers. It is the Monitor of the Access that
	// made Client. nil: silence is no problem.
	Monitor *ServerMonitor

	// Access made Client. A change of its files is a problem. nil: they are not read again.
	Access *Access

	Logger *slog.Logger // nil: nothing is logged
}

// Validate returns an error that names a missing field.
func (c Config) Validate() error {
	switch {
	case c.Client == nil:
		return errors.New("watch API server: no client")
	case c.NodeName == "":
		return errors.New("watch API server: no node name: set --hostname-override")
	}
	return nil
}

// Source watches an API server. Make one with New.
type Source struct {
	cfg      Config
	kinds    []watched
	services *serviceStore                      // one of kinds
	pods     *kindStore[*corev1.Pod, model.Pod] // one of kinds; nil: not read
	nodes    *nodeStore                         // one of kinds
	others   otherNodes

	mu        sync.Mutex // orders deliveries
	deliver   func(model.Delta, []model.Problem)
	started   bool              // the Full Delta was delivered
	unknown   bool              // as last delivered in NetworkPoliciesUnknown
	unread    model.Unread      // as last delivered in Unread
	uids      map[object]string // of objects with problems
	faults    map[object][]model.Problem
	lost      map[string]*failures // by kind: the reasons why the watch fails
	closed    map[string]bool      // by kind: the server has closed the last watch at once
	access    *accessFiles         // nil: not read again
	delivered []model.Problem
	// See newProblems.
	ofServer      []model.Problem // in delivered
	listed        time.Time       // when delivered was made
	faultsChanged bool            // since then
	listsLater    bool
	own           doNotTrack
	// othersLogged says that the log has the Services of other proxies.
	othersLogged bool

	ctx context.Context // Run's
	wg  sync.WaitGroup
}

// object identifies an object of one kind.
type object struct {
	kind string
	name model.Name
}

// watched is a kind of any type.
type watched interface {
	store
	title() string
	listWatch() cache.ListerWatcher
	example() any
	fill(*model.Delta) // with all objects
	state() (listed, forbidden, optional bool)
	watching(fromStart bool)
	refused(forbidden bool)
	isOurs() bool
	rbac() string
	dropAll(*model.Delta)
}

type store interface {
	cache.ReflectorStore
	cache.TransformingStore
}

// New prepares a Source; Run starts it.
func New(cfg Config) (*Source, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Source{
		cfg:    cfg,
		uids:   map[object]string{},
		faults: map[object][]model.Problem{},
		lost:   map[string]*failures{},
		closed: map[string]bool{},
	}
	if cfg.Access != nil {
		var err error
		if s.access, err = newAccessFiles(*cfg.Access); err != nil {
			return nil, err
		}
	}
	s.cfg.Nodes = cfg.Nodes.withDefaults()
	s.own = newDoNotTrack()
	s.others = otherNodes{unknown: map[string]bool{}, absent: map[string]bool{}, wake: make(chan struct{}, 1)}
	s.kinds = s.allKinds()
	return s, nil
}

// backoff spaces attempts to list and watch. It is long enough for a server that recovers
// under load, and short enough for a node.
var backoff = wait.Backoff{Duration: 500 * time.Millisecond, Cap: 15 * time.Second, Steps: 30, Factor: 2, Jitter: 1}

// Run watches until ctx ends, and returns nil then. Its contract is that of
// manifest.Source.Run. The first Delta is Full, problems are complete whenever they
// changed and nil otherwise, and calls of fn never overlap. Run retries for ever: a
// request that the server refuses or does not answer is a problem.
func (s *Source) Run(ctx context.Context, fn func(model.Delta, []model.Problem)) error {
	s.deliver = fn
	s.ctx = klog.NewContext(ctx, logr.FromSlogHandler(debugOnly{s.cfg.Logger.Handler()}))
	s.mu.Lock()
	for _, k := range s.kinds {
		if k != watched(s.nodes) {
			s.reflect(s.ctx, k, backoff)
		}
	}
	s.watchNodes()
	s.watchOwnPolicies()
	s.watchServer()
	if s.access != nil {
		s.wg.Go(func() { s.watchAccess(s.ctx) })
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.wg.Wait()
	return nil
}

// reflect lists and watches a kind until ctx ends.
func (s *Source) reflect(ctx context.Context, k watched, spaced wait.Backoff) {
	r := cache.NewReflectorWithOptions(s.observe(k), k.example(), k, cache.ReflectorOptions{
		Name: "spillway", TypeDescription: k.title(), Backoff: &spaced,
	})
	s.wg.Go(func() { r.RunWithContext(ctx) })
}

// watchServer reports when the server stops answering, and when it answers again.
func (s *Source) watchServer() {
	if s.cfg.Monitor == nil {
		return
	}
	s.wg.Go(func() {
		s.cfg.Monitor.run(s.ctx, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.emit(model.Delta{})
		})
	})
}

// ready sends the Full Delta as soon as it is complete. The caller holds mu.
func (s *Source) ready() bool {
	if s.started {
		return true
	}
	for _, k := range s.kinds {
		if listed, forbidden, optional := k.state(); !listed && !(optional && forbidden) {
			return false
		}
	}
	if !s.doNotTrackReady() {
		return false
	}
	s.started = true
	d := model.Delta{Full: true}
	for _, k := range s.kinds {
		k.fill(&d)
	}
	s.own.fill(&d)
	if s.unknown = s.policiesUnknown(); s.unknown {
		d.NetworkPoliciesUnknown = &s.unknown
	}
	if s.unread = s.unreadPolicies(); s.unread.Any() {
		unread := s.unread
		d.Unread = &unread
	}
	s.send(d)
	return false // all is delivered
}

// emit delivers a change after the Full Delta. The caller holds mu.
func (s *Source) emit(d model.Delta) {
	if !s.ready() {
		// Before the Full Delta it delivers problems only.
		s.send(model.Delta{})
		return
	}
	s.deliverWaitingPolicies(&d)
	if unknown := s.policiesUnknown(); unknown != s.unknown {
		s.unknown = unknown
		d.NetworkPoliciesUnknown = &unknown
	}
	if unread := s.unreadPolicies(); unread != s.unread {
		s.unread = unread
		d.Unread = &unread
	}
	s.send(d)
}

func (s *Source) send(d model.Delta) {
	if s.started {
		s.logOthers()
	}
	problems := s.newProblems()
	if !d.Empty() || problems != nil {
		s.deliver(d, problems)
	}
}

// policiesUnknown reports whether the server forbids a kind that decides which pods
// policies select. Earlier knowledge does not help: a new policy would be invisible.
func (s *Source) policiesUnknown() bool {
	return slices.ContainsFunc(s.kinds, func(k watched) bool {
		_, forbidden, optional := k.state()
		return optional && forbidden && !k.isOurs()
	})
}
