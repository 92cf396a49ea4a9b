package kube

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/model"
)

// reported identifies an Event about a policy: a part of it is not applied on this node,
// for a reason. The number of affected addresses is not part of it, since it changes with
// each pod.
type reported struct {
	uid    types.UID
	reason string
}

// reportRefusals writes Events about parts of policies that are no longer applied on this
// node. Each node writes its own, since a condition has only one message.
func (p *PolicyStatus) reportRefusals() {
	s := p.source
	s.mu.Lock()
	p.mu.Lock()
	var messages []message
	if p.synced && p.events != nil {
		now := map[reported]bool{}
		for name, refused := range p.refused {
			of, known := s.own.status[name]
			if !known {
				continue
			}
			for _, same := range byReason(refused) {
				key := reported{of.uid, same[0].Reason}
				if now[key] = true; !p.reported[key] {
					messages = append(messages, p.refusal(name, of.uid, same))
				}
			}
		}
		p.reported, p.reportedOnce = now, true
	}
	p.mu.Unlock()
	s.mu.Unlock()
	for _, m := range messages {
		p.events.pass(m)
	}
}

// byReason groups the refusals of one policy by reason.
func byReason(refused []model.PolicyRefusal) (out [][]model.PolicyRefusal) {
	for _, r := range refused {
		i := slices.IndexFunc(out, func(l []model.PolicyRefusal) bool { return l[0].Reason == r.Reason })
		if i < 0 {
			i, out = len(out), append(out, nil)
		}
		out[i] = append(out[i], r)
	}
	return out
}

// refusal returns the message about refusals of one policy with the same reason.
func (p *PolicyStatus) refusal(name string, uid types.UID, same []model.PolicyRefusal) message {
	note := refusalText(p.node, same[0])
	if more := len(same) - 1; more > 0 {
		note = shortened(note, maxNote-40) + fmt.Sprintf(" (and %d more like it on this node)", more)
	}
	m := aboutPolicy(name, uid, same[0].Reason, note, p.node)
	m.standing = !p.reportedOnce
	return m
}

// refusalText formats a refusal for conditions and Events.
func refusalText(node string, r model.PolicyRefusal) string {
	return "node " + node + ": " + strings.TrimPrefix(r.Field+": "+r.Message, ": ")
}

// changeOf returns the message about a new condition that is the same for all policies or
// on all nodes. The node that writes the condition reports it. It returns nil if the
// message was reported before, or if reportRefusals reports it.
func changeOf(name string, uid types.UID, had, now []metav1.Condition) *message {
	applied, said := meta.FindStatusCondition(now, v1alpha1.Applied), meta.FindStatusCondition(had, v1alpha1.Applied)
	if applied == nil || applied.Reason != notWritten && applied.Reason != notAcceptedReason {
		return nil
	}
	why := meta.FindStatusCondition(now, v1alpha1.Accepted).Message
	before := meta.FindStatusCondition(had, v1alpha1.Accepted)
	if said != nil && said.Reason == applied.Reason && before != nil && before.Message == why {
		return nil
	}
	note := applied.Message + "; the previous rules stay in effect, and the agent retries"
	if applied.Reason == notAcceptedReason {
		note = shortened(why, maxNote-100) + "; fix the policy. The previous version, if any, stays in effect."
	}
	m := aboutPolicy(name, uid, applied.Reason, note, note)
	return &m
}

// aboutPolicy makes a message about a policy. Events with the same reason and origin have
// the same name.
func aboutPolicy(name string, uid types.UID, reason, note, origin string) message {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %s", uid, reason, origin))
	return message{
		about: corev1.ObjectReference{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: policyKind, Name: name, UID: uid},
		typ:   corev1.EventTypeWarning, action: "Apply", what: reason, note: note,
		name: fmt.Sprintf("%s.%x", strings.TrimRight(name[:min(len(name), 200)], ".-"), sum[:8]),
	}
}

// shortened truncates a text to n bytes.
func shortened(text string, n int) string {
	if len(text) <= n {
		return text
	}
	return strings.ToValidUTF8(text[:n-3], "") + "..."
}
