package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"spillway.dev/spillway/internal/facts/model"
)

// failures holds the last errors of the list and of the watch of a kind. A Reflector tries
// one after the other, so each keeps its error until it succeeds.
type failures struct {
	kind        watched
	list, watch error
}

func (f *failures) each() (errs []error) {
	for _, err := range []error{f.list, f.watch} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// ofKind reports whether an error concerns one kind, not the whole server.
func ofKind(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsNotFound(err) }

// errClosed is the error of a watch that the server closes before its first event. client-go
// reports none, and a Reflector repeats the watch forever.
var errClosed = errors.New("the server closes watches at once")

// lostKinds returns what keeps kinds from being followed: a problem for each kind, and an
// error that concerns the server. So a place has one problem, whatever the requests fail
// with.
func (s *Source) lostKinds() (out []model.Problem, server error) {
	for _, name := range slices.Sorted(maps.Keys(s.lost)) {
		f := s.lost[name]
		var verbs []string
		var own error
		for i, err := range []error{f.list, f.watch} {
			switch {
			case err == nil:
			case ofKind(err):
				verbs = append(verbs, []string{"list", "watch"}[i])
				if own == nil || apierrors.IsForbidden(err) {
					own = err
				}
			case server == nil || apierrors.IsUnauthorized(err) || isClosed(server):
				server = err
			}
		}
		if own != nil {
			out = append(out, s.describeKind(f.kind, strings.Join(verbs, " and "), own))
		}
	}
	return out, server
}

// serverProblem returns the problem of the server. While it is silent, the problem is the
// first reason of its silence: the errors of requests may differ from each other.
func (s *Source) serverProblem(err error) (model.Problem, bool) {
	why := ""
	if s.cfg.Monitor != nil {
		why = s.cfg.Monitor.unreachableReason()
	}
	if why == "" && err != nil {
		why = reason(err)
	}
	return model.Problem{Where: "API server " + s.cfg.Server, What: why}, why != ""
}

// observe records the result of each list and watch of a kind.
func (s *Source) observe(k watched) cache.ListerWatcher {
	lw := cache.ToListerWatcherWithContext(k.listWatch())
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := lw.ListWithContext(ctx, o)
			s.onRequestDone(ctx, k, "list", err, nil)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := lw.WatchWithContext(ctx, o)
			fromStart := o.SendInitialEvents != nil
			if err == nil {
				return s.follow(ctx, k, w, fromStart), nil
			}
			s.onWatchFailed(ctx, k, err, fromStart)
			return w, err
		},
	}
}

// onWatchFailed records the error of a watch. After one that begins with all objects
// (WatchList), the Reflector lists, and that result counts: not every server has such
// watches, and an old etcd makes it an internal error. Some errors make it repeat the watch
// (cache.isWatchErrorRetriable).
func (s *Source) onWatchFailed(ctx context.Context, k watched, err error, fromStart bool) {
	repeats := errors.Is(err, errClosed) || utilnet.IsConnectionRefused(err) || apierrors.IsTooManyRequests(err)
	if fromStart && !repeats {
		s.cfg.Logger.Debug("Watch does not begin with a list", "kind", k.title(), "err", err)
		return
	}
	s.onRequestDone(ctx, k, "watch", err, nil)
}

// openTime is how long a watch without events must stay open to count as a success.
// client-go returns an empty watch if the server closes the connection. A Reflector calls
// a watch of less than a second very short.
const openTime = time.Second

// follow passes on the events of a watch, and records its success or its error. A watch is
// a success with its first event, or if it stays open. One that begins with all objects
// has an event.
func (s *Source) follow(ctx context.Context, k watched, w watch.Interface, fromStart bool) watch.Interface {
	out := make(chan watch.Event)
	stopped := make(chan struct{})
	stop := sync.OnceFunc(func() { close(stopped); w.Stop() })
	var open <-chan time.Time
	if !fromStart {
		open = time.After(openTime)
	}
	known := false // the watch has succeeded or failed
	done := func(err error) {
		if open, known = nil, true; err != nil {
			s.onWatchFailed(ctx, k, err, fromStart)
			return
		}
		s.onRequestDone(ctx, k, "watch", nil, func() { k.watching(fromStart) })
	}
	s.wg.Go(func() {
		defer close(out)
		defer stop()
		for {
			var e watch.Event
			var more bool
			select {
			case <-open:
				done(nil)
				continue
			case <-stopped:
				return
			case e, more = <-w.ResultChan():
			}
			switch {
			case !more:
				select {
				case <-stopped:
				default:
					if !known {
						done(errClosed)
					}
				}
				return
			case known:
			case e.Type == watch.Error:
				done(apierrors.FromObject(e.Object))
			default:
				done(nil)
			}
			select {
			case out <- e:
			case <-stopped:
				return
			}
		}
	})
	return &confirmedWatch{out, stop}
}

// confirmedWatch is a watch whose events are passed on.
type confirmedWatch struct {
	events chan watch.Event
	stop   func()
}

// ResultChan implements watch.Interface.
func (w *confirmedWatch) ResultChan() <-chan watch.Event { return w.events }

// Stop implements watch.Interface.
func (w *confirmedWatch) Stop() { w.stop() }

// onRequestDone records whether the server allows the list or watch of a kind. A watch, and
// a list of a kind that is only listed, has opened: with their success the kind is
// followed. onRequestDone calls it then.
func (s *Source) onRequestDone(ctx context.Context, k watched, verb string, err error, opened func()) {
	if ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && k.title() == policyKind {
		s.own.missing = false
	}
	f := s.lost[k.title()]
	switch {
	case errors.Is(err, errClosed) && !s.closed[k.title()]:
		s.closed[k.title()] = true // a server that ends closes each watch once
		return
	case err == nil && opened != nil:
		opened()
		delete(s.lost, k.title())
		delete(s.closed, k.title())
	case err == nil && f == nil:
	case err == nil: // the watch may still fail
		if f.list = nil; f.watch == nil {
			delete(s.lost, k.title())
		}
	case apierrors.IsResourceExpired(err) || apierrors.IsGone(err):
		// The server has forgotten the changes; the Reflector lists again.
		s.cfg.Logger.Debug("Watch expired", "kind", k.title())
	case k.title() == policyKind && apierrors.IsNotFound(err):
		s.withoutPolicies(k)
		return
	default:
		if f == nil {
			f = &failures{kind: k}
			s.lost[k.title()] = f
		}
		if verb == "list" {
			f.list = err
		} else {
			f.watch = err
		}
		k.refused(slices.ContainsFunc(f.each(), ofKind))
	}
	s.emit(model.Delta{})
}

// describeKind converts an error that concerns one kind into a problem with a remedy.
func (s *Source) describeKind(k watched, verbs string, err error) model.Problem {
	p := model.Problem{Where: "API server " + s.cfg.Server, Field: k.rbac()}
	_, _, optional := k.state()
	switch {
	case apierrors.IsNotFound(err):
		p.What = "the server does not have this API; Kubernetes 1.21 or newer is needed"
	case k.isOurs():
		p.What = fmt.Sprintf("DoNotTrackPolicies that need them are not applied: RBAC forbids to %s them; "+
			"grant list and watch", verbs)
	case optional:
		p.What = fmt.Sprintf("no traffic bypasses netfilter, since any pod may have a NetworkPolicy: RBAC forbids to %s them; "+
			"grant list and watch, or set --bypass", verbs)
	default:
		p.What = fmt.Sprintf("RBAC forbids to %s them; grant list and watch in the ClusterRole of this agent", verbs)
	}
	return p
}
