// Package kube watches a Kubernetes API server and delivers its objects as model.Deltas,
// of the same kinds that package manifest reads from files.
//
//	list, watch ──> Reflector ──> kind (kubeobject: decode, check) ──> Delta
//
// The package stores no API object, only model values, which intent stores too. The first
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
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"spillway.dev/spillway/internal/facts/model"
)

// Config says what is watched.
type Config struct {
	Client kubernetes.Interface
	// Server is the address of the API server, for messages.
	Server string
	// NodeName is the Node whose Pods are watched.
	NodeName string
	// ProxyName selects Services by service.kubernetes.io/service-proxy-name:
	// "" watches those without the label, another value only those with it.
	ProxyName string
	// Policies asks for NetworkPolicies and the Pods that they may select. If
	// the server forbids either, the source delivers the rest and says so
	// (model.Delta.PoliciesUnknown).
	Policies bool
	// DoNotTrack reads DoNotTrackPolicies, and, while there are any, the Pods and
	// Namespaces that they ask for; nil: there are none.
	DoNotTrack dynamic.Interface

	// Contact knows whether the server answers, and is that of the Access that
	// Client was made with; nil: silence is no problem.
	Contact *Contact

	Logger *slog.Logger // nil: nothing is logged
}

// Validate says what is missing.
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
	cfg   Config
	kinds []watched

	mu        sync.Mutex // orders what is delivered
	deliver   func(model.Delta, []model.Problem)
	started   bool              // the Full Delta is out
	unknown   bool              // as last delivered in PoliciesUnknown
	unread    model.Unread      // as last delivered in Unread
	uids      map[object]string // of objects with problems
	faults    map[object][]model.Problem
	lost      map[string]model.Problem // by kind: why it cannot be watched now
	delivered []model.Problem
	own       ownPolicies

	ctx context.Context // Run's
	wg  sync.WaitGroup
}

// object names one object of one kind.
type object struct {
	kind string
	name model.Name
}

// watched is a kind, whatever its type.
type watched interface {
	store
	title() string
	listWatch() cache.ListerWatcher
	example() any
	fill(*model.Delta) // with all there is
	state() (listed, forbidden, optional bool)
	watching(fromStart bool)
	refused(forbidden bool)
	uid(model.Name) string
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
		lost:   map[string]model.Problem{},
	}
	s.own = newOwnPolicies()
	s.kinds = s.allKinds()
	return s, nil
}

// backoff is how attempts to list and watch are spaced: no sooner than a server
// that comes back under load can bear, no later than a node can wait.
var backoff = wait.Backoff{Duration: 500 * time.Millisecond, Cap: 15 * time.Second, Steps: 30, Factor: 2, Jitter: 1}

// Run watches until ctx ends, and returns nil then. It has the contract of
// manifest.Source.Run: the first Delta is Full, problems are complete whenever
// they changed and nil otherwise, fn is never called twice at a time. It never
// gives up: what the server refuses or does not answer is a problem, and tried
// again.
func (s *Source) Run(ctx context.Context, fn func(model.Delta, []model.Problem)) error {
	s.deliver = fn
	// client-go says in its log what is told here as problems.
	s.ctx = klog.NewContext(ctx, logr.FromSlogHandler(debugOnly{s.cfg.Logger.Handler()}))
	s.mu.Lock()
	for _, k := range s.kinds {
		s.reflect(s.ctx, k, backoff)
	}
	s.watchOwnPolicies()
	s.watchContact()
	s.mu.Unlock()
	<-ctx.Done()
	s.wg.Wait()
	return nil
}

// reflect has a kind listed and watched until ctx ends.
func (s *Source) reflect(ctx context.Context, k watched, spaced wait.Backoff) {
	r := cache.NewReflectorWithOptions(s.observe(k), k.example(), k, cache.ReflectorOptions{
		Name: "spillway", TypeDescription: k.title(), Backoff: &spaced,
	})
	s.wg.Go(func() { r.RunWithContext(ctx) })
}

// watchContact has it told when the server falls silent, and when it is back.
func (s *Source) watchContact() {
	if s.cfg.Contact == nil {
		return
	}
	s.wg.Go(func() {
		s.cfg.Contact.run(s.ctx, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.emit(model.Delta{})
		})
	})
}

// ready sends the Full Delta as soon as there is one. The caller holds mu.
func (s *Source) ready() bool {
	if s.started {
		return true
	}
	for _, k := range s.kinds {
		if listed, forbidden, optional := k.state(); !listed && !(optional && forbidden) {
			return false
		}
	}
	if !s.ownPoliciesReady() {
		return false
	}
	s.started = true
	d := model.Delta{Full: true}
	for _, k := range s.kinds {
		k.fill(&d)
	}
	s.own.fill(&d)
	if s.unknown = s.policiesUnknown(); s.unknown {
		d.PoliciesUnknown = &s.unknown
	}
	if s.unread = s.unreadPolicies(); s.unread.Any() {
		unread := s.unread
		d.Unread = &unread
	}
	s.send(d)
	return false // all is said
}

// emit delivers a change, when it is time for changes. The caller holds mu.
func (s *Source) emit(d model.Delta) {
	if !s.ready() {
		// Before the Full Delta there is nothing to change; a problem is told.
		s.send(model.Delta{})
		return
	}
	s.releasePolicies(&d)
	if unknown := s.policiesUnknown(); unknown != s.unknown {
		s.unknown = unknown
		d.PoliciesUnknown = &unknown
	}
	if unread := s.unreadPolicies(); unread != s.unread {
		s.unread = unread
		d.Unread = &unread
	}
	s.send(d)
}

func (s *Source) send(d model.Delta) {
	problems := s.problems()
	if slices.Equal(problems, s.delivered) {
		problems = nil
	} else {
		s.delivered = problems
	}
	if !d.Empty() || problems != nil {
		s.deliver(d, problems)
	}
}

// policiesUnknown reports whether a kind that tells which pods are policed is
// kept from us. What was known before is no help: a policy may come unseen.
func (s *Source) policiesUnknown() bool {
	return slices.ContainsFunc(s.kinds, func(k watched) bool {
		_, forbidden, optional := k.state()
		return optional && forbidden && !k.isOurs()
	})
}
