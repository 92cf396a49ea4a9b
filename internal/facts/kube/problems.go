package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"spillway.dev/spillway/internal/facts/model"
)

// setFaults replaces the problems of an object.
func (s *Source) setFaults(o object, uid string, problems []model.Problem) {
	s.faultsChanged = s.faultsChanged || !slices.Equal(s.faults[o], problems)
	if len(problems) == 0 {
		delete(s.faults, o)
		delete(s.uids, o)
		return
	}
	s.faults[o], s.uids[o] = problems, uid
}

// Authors of objects can make any number of problems, and each list has them all. So a change
// that concerns none makes no list, and one of more than manyProblems comes once a listPeriod.
const (
	manyProblems = 1000
	listPeriod   = time.Second
)

// newProblems returns the current problems, sorted; nil if they are those that were delivered, or
// are listed later.
func (s *Source) newProblems() []model.Problem {
	ofServer := s.serverProblems()
	if !s.faultsChanged && slices.Equal(ofServer, s.ofServer) {
		return nil
	}
	if wait := listPeriod - time.Since(s.listed); wait > 0 && len(s.delivered) > manyProblems {
		if !s.listsLater {
			s.listsLater = true
			time.AfterFunc(wait, s.listLater)
		}
		return nil
	}
	s.faultsChanged, s.ofServer, s.listed = false, ofServer, time.Now()
	problems := append(s.objectProblems(), ofServer...)
	slices.SortFunc(problems, model.Problem.Compare)
	problems = slices.Compact(problems)
	if slices.Equal(problems, s.delivered) {
		return nil
	}
	s.delivered = problems
	return problems
}

func (s *Source) listLater() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listsLater = false; s.ctx.Err() == nil {
		s.emit(model.Delta{})
	}
}

// objectProblems returns the problems of objects, never nil.
func (s *Source) objectProblems() []model.Problem {
	out := []model.Problem{}
	for o, ps := range s.faults {
		// A slice of a Service that another proxy serves is not for this agent to judge.
		if name, ok := ps[0].Service(); ok && o.kind != model.KindService && !s.servesService(name) {
			continue
		}
		out = append(out, ps...)
	}
	return out
}

// serverProblems returns those of the API server, of the access to it and of this node's Node.
func (s *Source) serverProblems() []model.Problem {
	out, server := s.lostKinds()
	if p, ok := s.serverProblem(server); ok {
		out = append(out, p)
	}
	if s.access != nil && s.access.wrong != nil {
		out = append(out, *s.access.wrong)
	}
	if p, ok := s.missingNode(); ok {
		out = append(out, p)
	}
	return out
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

var resources = map[string]string{
	"Service": "services", "EndpointSlice": "endpointslices.discovery.k8s.io", "Node": "nodes",
	"NetworkPolicy": "networkpolicies.networking.k8s.io", "Pod": "pods",
}

// reason returns why the server does not serve, and the remedy. It omits the request, whose
// options change between attempts, so that the problem stays equal and is reported once.
func reason(err error) string {
	if apierrors.IsUnauthorized(err) {
		return "rejects the credentials; renew the token or the client certificate of the kubeconfig"
	}
	return cause(err) + "; the last state stays in effect, and the agent retries"
}

func cause(err error) string {
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
	case isClosed(err):
		return "closes connections; check whether a server is behind this address"
	case errors.As(err, &no):
		return "cannot be reached: " + no.Error()
	case errors.Is(err, context.DeadlineExceeded) || isTimeout(err):
		return "does not answer in time; check whether this node can reach it"
	case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
		return "answers " + string(apierrors.ReasonForError(err))
	}
	text := err.Error()
	if i := strings.LastIndex(text, ": "); i >= 0 {
		text = text[i+2:]
	}
	return "fails: " + text
}

// isClosed reports whether the server has closed the connection before its answer was
// complete. The error depends on when the client notices; net/http does not export all.
func isClosed(err error) bool {
	return utilnet.IsProbableEOF(err) || strings.Contains(err.Error(), "server closed idle connection") ||
		slices.ContainsFunc([]error{errClosed, io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE},
			func(closed error) bool { return errors.Is(err, closed) })
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}
