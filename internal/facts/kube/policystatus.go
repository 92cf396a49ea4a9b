package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/model"
)

// PolicyStatus writes the status of DoNotTrackPolicies. Accepted is the same on every
// node, so the first node writes it and the others see it. Applied is true until a node
// cannot apply the whole policy. That node reports its name and sets Applied to true
// again. Any node resets the condition of a removed node.
type PolicyStatus struct {
	source *Source
	node   string
	log    *slog.Logger

	events *Events // nil: no Events

	mu      sync.Mutex
	synced  bool
	refused map[string][]model.PolicyRefusal // by policy
	failed  error

	// Only Run uses these.
	reported     map[reported]bool // by Events
	reportedOnce bool
}

// NewPolicyStatus makes a PolicyStatus for the policies of a Source. If e is not nil, it
// also reports refusals as Events.
func NewPolicyStatus(s *Source, e *Events) *PolicyStatus {
	return &PolicyStatus{source: s, node: s.cfg.NodeName, log: s.cfg.Logger, events: e}
}

// Update stores the refusals of this node, and the error if no rule could be written. It
// does not block.
func (p *PolicyStatus) Update(refused []model.PolicyRefusal, failed error) {
	p.mu.Lock()
	p.synced, p.failed, p.refused = true, failed, map[string][]model.PolicyRefusal{}
	for _, r := range refused {
		p.refused[r.Policy] = append(p.refused[r.Policy], r)
	}
	p.mu.Unlock()
	p.source.own.changed()
}

// spreadPerNode times the number of nodes is the longest random delay before a node
// writes, so that one node is first.
const spreadPerNode = 10 * time.Millisecond

// Run writes until ctx ends, and returns nil then.
func (p *PolicyStatus) Run(ctx context.Context) error {
	again := time.NewTimer(time.Hour)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-again.C:
		case <-p.source.own.wake:
		}
		spread := min(spreadPerNode*time.Duration(p.nodes()), 30*time.Second)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(rand.N(spread + time.Millisecond)):
		}
		p.reportRefusals()
		again.Reset(p.writeAll(ctx))
	}
}

func (p *PolicyStatus) nodes() (n int) {
	p.source.mu.Lock()
	defer p.source.mu.Unlock()
	p.eachNode(func(string) { n++ })
	return n
}

func (p *PolicyStatus) eachNode(do func(string)) {
	for _, k := range p.source.kinds {
		if nodes, ok := k.(*nodeStore); ok {
			for name := range nodes.known {
				do(name.Name)
			}
		}
	}
}

// writeAll writes changed conditions, and returns the time until the next check.
func (p *PolicyStatus) writeAll(ctx context.Context) (again time.Duration) {
	again = 5 * time.Minute
	for name, w := range p.wanted() {
		if ctx.Err() != nil {
			return again
		}
		done, err := p.write(ctx, name, w)
		if err != nil {
			again = 5 * time.Second
			p.log.Debug("Write status of a policy", "policy", name, "err", err)
		}
		if m := w.message; done && m != nil && p.events != nil {
			p.events.pass(*m)
		}
	}
	return again
}

// policyChange is a status to write, and the message to report afterwards.
type policyChange struct {
	policyObject
	message *message
}

// wanted lists the policies whose conditions are to change.
func (p *PolicyStatus) wanted() map[string]policyChange {
	s := p.source
	s.mu.Lock()
	defer s.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]policyChange{}
	if !p.synced {
		return out
	}
	nodes := map[string]bool{}
	p.eachNode(func(name string) { nodes[name] = true })
	for name, have := range maps.All(s.own.status) {
		want := have
		now := &want.status
		now.Conditions = slices.Clone(now.Conditions)
		a := accepted(have.generation, s.faults[object{policyKind, model.Name{Name: name}}])
		changed := meta.SetStatusCondition(&now.Conditions, a)
		if a.Status == metav1.ConditionFalse {
			changed = setApplied(now, notAccepted(have.generation), "") || changed
		} else if c, reporter := p.applied(name, have.generation); p.mayWrite(have.status, c, nodes) {
			changed = setApplied(now, c, reporter) || changed
		}
		if changed {
			out[name] = policyChange{want, changeOf(name, have.uid, have.status.Conditions, now.Conditions)}
		}
	}
	return out
}

func accepted(generation int64, problems []model.Problem) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.Accepted, Status: metav1.ConditionTrue, Reason: "Valid", ObservedGeneration: generation,
		Message: "The policy is valid.",
	}
	if len(problems) > 0 {
		c.Status, c.Reason = metav1.ConditionFalse, "Invalid"
		var texts []string
		for _, p := range problems {
			texts = append(texts, strings.TrimPrefix(p.Field+": "+p.What, ": "))
		}
		c.Message = strings.Join(texts, "; ")
	}
	return c
}

// Reasons of Applied that do not come from a PolicyRefusal.
const (
	notWritten        = "NotWritten"
	notAcceptedReason = "NotAccepted"
)

// notAccepted returns the condition Applied of a policy that is not accepted. It is the
// same on every node, and any node resets it.
func notAccepted(generation int64) metav1.Condition {
	return metav1.Condition{
		Type: v1alpha1.Applied, Status: metav1.ConditionFalse, Reason: notAcceptedReason, ObservedGeneration: generation,
		Message: "The current version of the policy is not accepted, see the condition Accepted; the previous version, if any, stays in effect.",
	}
}

// applied returns the condition Applied of this node, and the node's name if it is false.
func (p *PolicyStatus) applied(name string, generation int64) (c metav1.Condition, reporter string) {
	c = metav1.Condition{Type: v1alpha1.Applied, Status: metav1.ConditionFalse, ObservedGeneration: generation}
	switch refused := p.refused[name]; {
	case len(refused) > 0:
		c.Reason, c.Message = refused[0].Reason, refusalText(p.node, refused[0])
	case p.failed != nil:
		c.Reason, c.Message = notWritten, fmt.Sprintf("node %s: %v", p.node, p.failed)
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, "Applied", "Every node applies the whole policy."
		return c, ""
	}
	return c, p.node
}

// setApplied sets the condition Applied and its reporter. It reports whether the condition
// changed.
func setApplied(s *v1alpha1.DoNotTrackPolicyStatus, c metav1.Condition, reporter string) bool {
	s.ReportingNodeName = reporter
	return meta.SetStatusCondition(&s.Conditions, c)
}

// unreportedPeriod is the age at which any node resets a false condition without a
// reporter.
const unreportedPeriod = 5 * time.Minute

// mayWrite reports whether this node may write c as the condition Applied. The reporter
// is missing if an agent of an earlier version wrote the false condition, or if the CRD
// is of an earlier version. In that case nodes only reset the condition, and not at once.
// Otherwise two nodes would overwrite each other without end.
func (p *PolicyStatus) mayWrite(have v1alpha1.DoNotTrackPolicyStatus, c metav1.Condition, nodes map[string]bool) bool {
	before := meta.FindStatusCondition(have.Conditions, v1alpha1.Applied)
	switch {
	case before == nil || before.Status != metav1.ConditionFalse || before.Reason == notAcceptedReason:
		return true
	case have.ReportingNodeName == "":
		return c.Status == metav1.ConditionTrue && time.Since(before.LastTransitionTime.Time) > unreportedPeriod
	}
	return have.ReportingNodeName == p.node || !nodes[have.ReportingNodeName]
}

// write replaces the status, unless the object has changed meanwhile.
func (p *PolicyStatus) write(ctx context.Context, name string, w policyChange) (done bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	status := map[string]any{"conditions": w.status.Conditions, "reportingNodeName": nil} // nil deletes it
	if w.status.ReportingNodeName != "" {
		status["reportingNodeName"] = w.status.ReportingNodeName
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": w.version}, "status": status})
	if err != nil {
		return false, err
	}
	_, err = p.source.cfg.DoNotTrack.Resource(v1alpha1.DoNotTrackPolicies).
		Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "spillway"}, "status")
	switch {
	case apierrors.IsConflict(err):
		return false, nil // the watch delivers the change and wakes Run
	case apierrors.IsNotFound(err):
		p.source.mu.Lock()
		delete(p.source.own.status, name)
		p.source.mu.Unlock()
		return false, nil
	}
	return err == nil, err
}
