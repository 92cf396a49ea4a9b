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

// told is what of a policy was told by an Event: that something does not hold on this
// node, for a reason. At how many addresses it does not, changes with each pod, and is
// no news.
type told struct {
	uid    types.UID
	reason string
}

// tellRefusals passes on what does not hold on this node any more. Each node has its own
// to say, since a condition has room for one.
func (p *PolicyStatus) tellRefusals() {
	s := p.source
	s.mu.Lock()
	p.mu.Lock()
	var messages []message
	if p.synced && p.events != nil {
		now := map[told]bool{}
		for name, refused := range p.refused {
			of, known := s.own.status[name]
			if !known {
				continue
			}
			for _, same := range byReason(refused) {
				key := told{of.uid, same[0].Reason}
				if now[key] = true; !p.told[key] {
					messages = append(messages, p.refusal(name, of.uid, same))
				}
			}
		}
		p.told, p.toldOnce = now, true
	}
	p.mu.Unlock()
	s.mu.Unlock()
	for _, m := range messages {
		p.events.pass(m)
	}
}

// byReason sorts what is refused of one policy into lists of one reason each.
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

// refusal is what is told of refusals of one policy that have the same reason.
func (p *PolicyStatus) refusal(name string, uid types.UID, same []model.PolicyRefusal) message {
	note := refusalText(p.node, same[0])
	if more := len(same) - 1; more > 0 {
		note = shortened(note, maxNote-40) + fmt.Sprintf(" (and %d more like it on this node)", more)
	}
	m := aboutPolicy(name, uid, same[0].Reason, note, p.node)
	m.standing = !p.toldOnce
	return m
}

// refusalText is a refusal as conditions and Events have it.
func refusalText(node string, r model.PolicyRefusal) string {
	return "node " + node + ": " + strings.TrimPrefix(r.Field+": "+r.Message, ": ")
}

// changeOf is what is told when a condition is written that says the same of all
// policies, or on all nodes: whoever writes it tells it. nil: it was said before, or
// tellRefusals does.
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

// aboutPolicy makes a message about a policy. Its Event has the same name whenever it is
// about the same reason and of the same origin.
func aboutPolicy(name string, uid types.UID, reason, note, origin string) message {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %s", uid, reason, origin))
	return message{
		about: corev1.ObjectReference{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: policyKind, Name: name, UID: uid},
		typ:   corev1.EventTypeWarning, action: "Apply", what: reason, note: note,
		name: fmt.Sprintf("%s.%x", strings.TrimRight(name[:min(len(name), 200)], ".-"), sum[:8]),
	}
}

// shortened cuts a text that is longer than n bytes.
func shortened(text string, n int) string {
	if len(text) <= n {
		return text
	}
	return strings.ToValidUTF8(text[:n-3], "") + "..."
}
