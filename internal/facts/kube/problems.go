package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"syscall"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"spillway.dev/spillway/internal/facts/model"
)

// setFaults replaces the problems of an object.
func (s *Source) setFaults(o object, uid string, problems []model.Problem) {
	if len(problems) == 0 {
		delete(s.faults, o)
		delete(s.uids, o)
		return
	}
	s.faults[o], s.uids[o] = problems, uid
}

// problems returns the current problems, sorted, never nil.
func (s *Source) problems() []model.Problem {
	out := []model.Problem{}
	for o, ps := range s.faults {
		// A slice of a Service that another proxy serves is not for this agent to judge.
		if name, ok := ps[0].Service(); ok && o.kind != model.KindService && !s.servesService(name) {
			continue
		}
		out = append(out, ps...)
	}
	out = append(out, slices.Collect(maps.Values(s.lost))...)
	if p, ok := s.silence(); ok {
		out = append(out, p)
	}
	if p, ok := s.missingNode(); ok {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b model.Problem) int {
		return cmp.Or(cmp.Compare(a.Where, b.Where), cmp.Compare(a.Field, b.Field), cmp.Compare(a.What, b.What))
	})
	return slices.Compact(out)
}

// silence returns the problem that the server does not answer, unless the error of a
// request says why.
func (s *Source) silence() (model.Problem, bool) {
	if s.cfg.Contact == nil {
		return model.Problem{}, false
	}
	for _, p := range s.lost {
		if p.Field == "" {
			return model.Problem{}, false
		}
	}
	return s.cfg.Contact.problem(s.cfg.Server)
}

// missingNode returns the problem that this node has no Node object. Package intent
// detects the case where other Nodes exist.
func (s *Source) missingNode() (model.Problem, bool) {
	_, bad := s.faults[object{s.nodes.name, model.Name{Name: s.cfg.NodeName}}]
	anyOther := s.others.kind != nil && len(s.others.kind.known) > 0
	return model.ClusterProblem(model.KindNode, s.cfg.NodeName, "",
		"does not exist: no endpoint counts as on this node, and /healthz reports the node as removed; set its name with --hostname-override",
	), s.nodes.listed && len(s.nodes.known) == 0 && !anyOther && !bad
}

// UID returns the UID of a Service that was seen, or of a Pod with host ports (model.HostPortsOf);
// "" if it is not known.
func (s *Source) UID(name model.Name) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if pod, is := model.PodOf(name); is {
		if s.pods == nil || s.pods.known[pod] == nil {
			return ""
		}
		return s.pods.known[pod].UID
	}
	if m := s.services.known[name]; m != nil {
		return cmp.Or(s.uids[object{model.KindService, name}], m.UID)
	}
	return s.uids[object{model.KindService, name}]
}

// servesService reports whether this agent is to serve the Service.
func (s *Source) servesService(name model.Name) bool {
	_, invalid := s.faults[object{model.KindService, name}]
	return s.services.known[name] != nil || invalid
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
			if apierrors.IsInvalid(err) && o.SendInitialEvents != nil {
				// Not a watch that this server knows (WatchList); the Reflector lists.
				s.cfg.Logger.Debug("Watch does not begin with a list", "kind", k.title())
				return w, err
			}
			s.onRequestDone(ctx, k, "watch", err, func() { k.watching(o.SendInitialEvents != nil) })
			return w, err
		},
	}
}

// onRequestDone records whether the server allows the list or watch of a kind. It calls
// opened, which may be nil, after success.
func (s *Source) onRequestDone(ctx context.Context, k watched, verb string, err error, opened func()) {
	if ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, forbidden, _ := k.state()
	if err == nil && k.title() == policyKind {
		s.own.missing = false
	}
	switch {
	case err == nil && opened != nil:
		opened()
		delete(s.lost, k.title())
	case err == nil && !forbidden:
		delete(s.lost, k.title())
	case err == nil: // the watch may still be forbidden
	case apierrors.IsResourceExpired(err) || apierrors.IsGone(err):
		// The server has forgotten the changes; the Reflector lists again.
		s.cfg.Logger.Debug("Watch expired", "kind", k.title())
	case k.isOurs() && apierrors.IsNotFound(err) && k.title() == policyKind:
		s.withoutPolicies(k)
		return
	default:
		k.refused(apierrors.IsForbidden(err) || apierrors.IsNotFound(err))
		s.lost[k.title()] = s.describe(k, verb, err)
	}
	s.emit(model.Delta{})
}

// describe converts an error of the API server into a problem with a remedy.
func (s *Source) describe(k watched, verb string, err error) model.Problem {
	p := model.Problem{Where: "API server " + s.cfg.Server}
	resource := k.rbac()
	_, _, optional := k.state()
	switch {
	case apierrors.IsForbidden(err) && k.isOurs():
		p.Field, p.What = resource, fmt.Sprintf("DoNotTrackPolicies that need them are not applied: RBAC forbids to %s them; "+
			"grant list and watch", verb)
	case apierrors.IsForbidden(err) && optional:
		p.Field, p.What = resource, fmt.Sprintf("no traffic bypasses netfilter, since any pod may have a NetworkPolicy: RBAC forbids to %s them; "+
			"grant list and watch, or set --bypass", verb)
	case apierrors.IsForbidden(err):
		p.Field, p.What = resource, fmt.Sprintf("RBAC forbids to %s them; grant list and watch in the ClusterRole of this agent", verb)
	case apierrors.IsNotFound(err):
		p.Field, p.What = resource, "the server does not have this API; Kubernetes 1.21 or newer is needed"
	case apierrors.IsUnauthorized(err):
		p.What = "rejects the credentials; renew the token or the client certificate of the kubeconfig"
	default:
		p.What = reason(err) + "; the last state stays in effect, and the agent retries"
	}
	return p
}

var resources = map[string]string{
	"Service": "services", "EndpointSlice": "endpointslices.discovery.k8s.io", "Node": "nodes",
	"NetworkPolicy": "networkpolicies.networking.k8s.io", "Pod": "pods",
}

// reason returns why the server did not answer. It omits the request, whose options
// change between attempts, so that the problem stays equal and is reported once.
func reason(err error) string {
	var (
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
		invalid  x509.CertificateInvalidError
		alert    tls.AlertError
		dns      *net.DNSError
		no       syscall.Errno
	)
	switch {
	case errors.As(err, &unknown):
		return "has a certificate of an unknown authority; set the right certificate-authority in the kubeconfig"
	case errors.As(err, &hostname):
		return "has a certificate for other names; set the server to one of them, or set tls-server-name in the kubeconfig"
	case errors.As(err, &invalid):
		return "has a certificate that is not valid: " + invalid.Error()
	case errors.As(err, &alert):
		return "refuses TLS: " + alert.Error()
	case errors.As(err, &dns):
		return "has a name that cannot be resolved: " + dns.Err
	case errors.As(err, &no):
		return "cannot be reached: " + no.Error()
	case errors.Is(err, context.DeadlineExceeded) || isTimeout(err):
		return "does not answer in time"
	case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
		return "answers " + string(apierrors.ReasonForError(err))
	}
	text := err.Error()
	if i := strings.LastIndex(text, ": "); i >= 0 {
		text = text[i+2:]
	}
	return "fails: " + text
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// debugOnly lowers every record to level debug.
type debugOnly struct{ slog.Handler }

// Enabled implements slog.Handler.
func (h debugOnly) Enabled(ctx context.Context, _ slog.Level) bool {
	return h.Handler.Enabled(ctx, slog.LevelDebug)
}

// Handle implements slog.Handler. logr does not call Enabled before it logs an error.
func (h debugOnly) Handle(ctx context.Context, r slog.Record) error {
	if r.Level = slog.LevelDebug; !h.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h debugOnly) WithAttrs(attrs []slog.Attr) slog.Handler {
	return debugOnly{h.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h debugOnly) WithGroup(name string) slog.Handler { return debugOnly{h.Handler.WithGroup(name)} }
