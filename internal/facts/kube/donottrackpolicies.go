package kube

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

const policyKind = model.KindDoNotTrackPolicy

// policyBackoff spaces requests to a server that may lack the CRD. Every node of the
// cluster sends them.
var policyBackoff = wait.Backoff{Duration: time.Second, Cap: 2 * time.Minute, Steps: 30, Factor: 2, Jitter: 1}

// doNotTrack holds the DoNotTrackPolicies and the objects that they need: pods of this
// node, namespaces, and the pods of each selection of peers. A selection of peers is
// limited to one namespace if it names one. A policy is delivered after everything that
// it needs has been listed, because it would deny unknown peers.
type doNotTrack struct {
	known  map[string]*model.DoNotTrackPolicy
	held   map[string]*model.DoNotTrackPolicy // not delivered yet
	status map[string]policyObject
	needs  map[need]*needed
	kind   watched
	wake   chan struct{} // holds one token when a status may have to be written
	// missing reports that the server lacks the kind, and that the log says so.
	missing bool
}

// policyObject is the status of a policy and the identity of its object.
type policyObject struct {
	uid        types.UID
	version    string // resourceVersion
	generation int64
	status     v1alpha1.DoNotTrackPolicyStatus
}

// need is one selection of objects that policies need.
type need struct {
	namespaces bool
	here       bool   // pods of this node
	namespace  string // pods of one namespace, or of all
	selector   string // label selector of the pods
}

type needed struct {
	kind watched
	stop context.CancelFunc
}

func newDoNotTrack() doNotTrack {
	return doNotTrack{
		known: map[string]*model.DoNotTrackPolicy{}, held: map[string]*model.DoNotTrackPolicy{},
		status: map[string]policyObject{}, needs: map[need]*needed{}, wake: make(chan struct{}, 1),
	}
}

func (o *doNotTrack) fill(d *model.Delta) {
	clear(o.held)
	for name, p := range o.known {
		enter(&d.DoNotTrackPolicies, name, p)
	}
	for _, n := range o.needs {
		n.kind.fill(d)
	}
}

// watchOwnPolicies starts the watch of policies. The caller holds mu.
func (s *Source) watchOwnPolicies() {
	if s.cfg.DoNotTrack == nil {
		return
	}
	r := s.cfg.DoNotTrack.Resource(v1alpha1.DoNotTrackPolicies)
	k := &kindStore[*unstructured.Unstructured, model.DoNotTrackPolicy]{
		source: s, name: policyKind, known: map[model.Name]*model.DoNotTrackPolicy{}, ours: true, optional: true,
		resource: v1alpha1.DoNotTrackPolicies.GroupResource().String(),
		lw:       listWatch(r.List, r.Watch, metav1.ListOptions{}),
		convert:  s.convertPolicy,
		sample:   policySample(),
		put:      func(d *model.Delta, n model.Name, m *model.DoNotTrackPolicy) { s.putPolicy(d, n.Name, m) },
	}
	s.own.kind = k
	s.reflect(s.ctx, k, policyBackoff)
}

// policySample returns the type of objects that the Reflector expects.
func policySample() *unstructured.Unstructured {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(v1alpha1.SchemeGroupVersion.WithKind(policyKind))
	return u
}

func (s *Source) convertPolicy(u *unstructured.Unstructured) (*model.DoNotTrackPolicy, []model.Problem) {
	var o v1alpha1.DoNotTrackPolicy
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &o); err != nil {
		return nil, []model.Problem{unreadable(u.GetName(), err)}
	}
	s.own.status[o.Name] = policyObject{o.UID, o.ResourceVersion, o.Generation, o.Status}
	s.own.changed()
	return kubeobject.DoNotTrackPolicy(&o)
}

func unreadable(name string, err error) model.Problem {
	return model.ClusterProblem(policyKind, name, "", fmt.Sprintf("cannot be read: %v", err))
}

// putPolicy stores a policy and watches the objects that it needs. A deletion is
// delivered at once.
func (s *Source) putPolicy(d *model.Delta, name string, m *model.DoNotTrackPolicy) {
	if m == nil {
		delete(s.own.known, name)
		delete(s.own.held, name)
		delete(s.own.status, name)
		enter(&d.DoNotTrackPolicies, name, nil)
	} else {
		s.own.known[name], s.own.held[name] = m, m
	}
	s.updateWatches(d)
}

// noCRD is the remedy for a server that lacks the kind. Helm installs CRDs with a chart,
// but does not add them in an upgrade.
const noCRD = "the CRD donottrackpolicies.policy.spillway.dev is not installed, or too old to serve " +
	"v1alpha1; kubectl apply -f deploy/helm/spillway/crds"

// withoutPolicies records that the server lacks the kind, and logs it once. The caller
// holds mu.
func (s *Source) withoutPolicies(k watched) {
	switch {
	case s.own.missing:
	case len(s.own.known) > 0:
		s.cfg.Logger.Warn("DoNotTrackPolicies are no longer applied", "why", noCRD)
	default:
		s.cfg.Logger.Info("DoNotTrackPolicy is disabled", "why", noCRD)
	}
	s.own.missing = true
	var d model.Delta
	k.dropAll(&d)
	k.refused(true)
	delete(s.lost, k.title())
	s.emit(d)
}

// unreadPolicies returns, for model.Delta, the policies that the server has and the agent
// does not know. These are all of them, or the first policy that is not accepted and has
// no known earlier version.
func (s *Source) unreadPolicies() model.Unread {
	if s.own.kind == nil {
		return model.Unread{}
	}
	if _, forbidden, _ := s.own.kind.state(); forbidden && !s.own.missing {
		return model.Unread{Reason: model.UnreadPolicies, Text: "DoNotTrackPolicies, which RBAC forbids,"}
	}
	names := []string{}
	for o := range s.faults {
		if o.kind == policyKind && s.own.known[o.name.Name] == nil {
			names = append(names, o.name.Name)
		}
	}
	if len(names) == 0 {
		return model.Unread{}
	}
	return model.Unread{Reason: model.UnreadPolicy, Text: policyKind + " " + slices.Min(names)}
}

// doNotTrackReady reports whether policies and all that they need have been listed, or
// are forbidden.
func (s *Source) doNotTrackReady() bool {
	if s.own.kind == nil {
		return s.cfg.DoNotTrack == nil
	}
	if listed, forbidden, _ := s.own.kind.state(); !listed && !forbidden {
		return false
	}
	for _, n := range s.own.needs {
		if listed, forbidden, _ := n.kind.state(); !listed && !forbidden {
			return false
		}
	}
	return true
}

// deliverWaitingPolicies delivers policies that waited. A policy that needs a forbidden kind
// keeps waiting.
func (s *Source) deliverWaitingPolicies(d *model.Delta) {
	for name, p := range s.own.held {
		ready := true
		for n := range s.needsOf(p) {
			listed, _, _ := s.own.needs[n].kind.state()
			ready = ready && listed
		}
		if ready {
			delete(s.own.held, name)
			enter(&d.DoNotTrackPolicies, name, p)
		}
	}
}

// needsOf returns the objects that a policy needs.
func (s *Source) needsOf(p *model.DoNotTrackPolicy) map[need]bool {
	out := map[need]bool{}
	selection := func(sel *model.PodSelection, peer bool) {
		if sel == nil {
			return
		}
		one := onlyNamespace(sel.Namespaces)
		if sel.Namespaces != nil && one == "" {
			out[need{namespaces: true}] = true
		}
		if peer {
			out[need{namespace: one, selector: selectorText(sel.Pods)}] = true
		} else {
			out[need{here: true}] = true
		}
	}
	selection(p.Pods, false)
	for _, r := range slices.Concat(p.Ingress, p.Egress) {
		for _, peer := range r.Peers {
			selection(peer.Pods, true)
		}
	}
	return out
}

// onlyNamespace returns the namespace of a selector that consists of its name only, else
// "".
func onlyNamespace(s *model.Selector) string {
	if s == nil || len(s.MatchLabels) != 1 || len(s.Expressions) > 0 {
		return ""
	}
	return s.MatchLabels[corev1.LabelMetadataName]
}

// selectorText formats a selector for the API's query.
func selectorText(s *model.Selector) string {
	if s == nil {
		return ""
	}
	sel := &metav1.LabelSelector{MatchLabels: s.MatchLabels}
	for _, r := range s.Expressions {
		sel.MatchExpressions = append(sel.MatchExpressions, metav1.LabelSelectorRequirement{
			Key: r.Key, Operator: metav1.LabelSelectorOperator(r.Operator), Values: r.Values,
		})
	}
	query, err := metav1.LabelSelectorAsSelector(sel)
	if err != nil {
		return "" // the reader has checked it; all pods include the selected ones
	}
	return query.String()
}

// updateWatches starts and ends watches, so that exactly the needed objects are watched.
// The caller holds mu.
func (s *Source) updateWatches(d *model.Delta) {
	want := map[need]bool{}
	for _, p := range s.own.known {
		maps.Copy(want, s.needsOf(p))
	}
	for n := range want {
		if s.own.needs[n] != nil {
			continue
		}
		ctx, stop := context.WithCancel(s.ctx)
		one := &needed{kind: s.kindFor(n), stop: stop}
		s.own.needs[n] = one
		s.reflect(ctx, one.kind, backoff)
	}
	for n, one := range s.own.needs {
		if want[n] {
			continue
		}
		one.stop()
		delete(s.own.needs, n)
		delete(s.lost, one.kind.title())
		one.kind.dropAll(d)
	}
}

// kindFor returns a kind that watches the needed objects.
func (s *Source) kindFor(n need) watched {
	c := s.cfg.Client.CoreV1()
	if n.namespaces {
		return &kindStore[*corev1.Namespace, model.Namespace]{
			source: s, name: "Namespace", known: map[model.Name]*model.Namespace{}, convert: kubeobject.Namespace,
			ours: true, optional: true, resource: "namespaces",
			trim: func(o *corev1.Namespace) { o.Annotations = nil },
			lw:   listWatch(c.Namespaces().List, c.Namespaces().Watch, metav1.ListOptions{}),
			put:  func(d *model.Delta, n model.Name, m *model.Namespace) { enter(&d.Namespaces, n.Name, m) },
		}
	}
	name, which := "Pod of policies, "+strings.TrimSpace(n.namespace+" "+n.selector), metav1.ListOptions{LabelSelector: n.selector}
	if n.here {
		name, which = "Pod of policies, here", metav1.ListOptions{FieldSelector: "spec.nodeName=" + s.cfg.NodeName}
	}
	pods := c.Pods(n.namespace)
	return &kindStore[*corev1.Pod, model.Pod]{
		source: s, name: name, known: map[model.Name]*model.Pod{}, convert: kubeobject.Pod, trim: trimPod,
		ours: true, optional: true, resource: "pods",
		lw: listWatch(pods.List, pods.Watch, which), put: s.putPod,
	}
}

// putPod delivers a pod. A pod that one watch deletes may still exist in another.
func (s *Source) putPod(d *model.Delta, n model.Name, m *model.Pod) {
	if m == nil {
		for _, k := range s.podKinds() {
			if other := k.known[n]; other != nil {
				m = other
			}
		}
	}
	enter(&d.Pods, n, m)
}

func (s *Source) podKinds() (out []*kindStore[*corev1.Pod, model.Pod]) {
	for _, k := range s.kinds {
		if p, ok := k.(*kindStore[*corev1.Pod, model.Pod]); ok {
			out = append(out, p)
		}
	}
	for _, n := range s.own.needs {
		if p, ok := n.kind.(*kindStore[*corev1.Pod, model.Pod]); ok {
			out = append(out, p)
		}
	}
	return out
}

// changed wakes the writer of the status.
func (o *doNotTrack) changed() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}
