package kube

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/facts/model"
)

// Events tells the owners of Services and of DoNotTrackPolicies, by Events, what is
// wrong with them, and the owner of the node what was done to it. One message is one
// Event, and all together are limited: every node has the same to say about a bad
// Service.
type Events struct {
	client   kubernetes.Interface
	node     string
	uid      func(model.Name) string
	log      *slog.Logger
	messages chan message
	limit    *rate.Limiter
	refused  *rate.Limiter // of TellRefused, so that a pod cannot crowd out other Events
	told     map[message]time.Time
}

// message is what one Event says, and of what.
type message struct {
	about             corev1.ObjectReference
	typ, action, what string // of the Event; what is its reason
	note              string
	// name is that of the Event, "" for one that the server makes up. What has a name
	// is told once, however the note words it.
	name string
	// standing says that it was so when this agent started: the one before has told it,
	// by the same name.
	standing bool
}

const (
	// maxWaiting is how many messages wait for their turn; the log has the rest.
	maxWaiting = 200
	// toldFor is how long a message that went and came back is not told again.
	toldFor = 10 * time.Minute
	// maxNote is the longest note that the API takes (events.k8s.io/v1).
	maxNote = 1024
	// reporter is who says it.
	reporter = "spillway.dev/agent"
)

// NewEvents prepares Events of one node; uid knows the UIDs of Services.
func NewEvents(client kubernetes.Interface, node string, uid func(model.Name) string, log *slog.Logger) *Events {
	return &Events{
		client: client, node: node, uid: uid, log: log,
		messages: make(chan message, maxWaiting),
		limit:    rate.NewLimiter(rate.Every(5*time.Second), 20),
		refused:  rate.NewLimiter(rate.Every(time.Minute), 10),
		told:     map[message]time.Time{},
	}
}

// Tell passes on problems that appeared. It does not wait.
func (e *Events) Tell(problems []model.Problem) {
	for _, p := range problems {
		name, ok := p.Service()
		if !ok {
			continue
		}
		note := p.What
		if p.Field != "" {
			note = p.Field + ": " + note
		}
		e.pass(message{
			about: corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: name.Namespace, Name: name.Name},
			typ:   corev1.EventTypeWarning, action: "Serve", what: "NotServedAsAsked", note: note,
		})
	}
}

// TellNode passes on what was done to the node itself. It does not wait.
func (e *Events) TellNode(note string) {
	e.pass(message{
		// As the kubelet writes its own: with the name for a UID.
		about: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.node, UID: types.UID(e.node)},
		typ:   corev1.EventTypeNormal, action: "Tune", what: "ConntrackAutopilot", note: note,
	})
}

// TellRefused passes on that an address which a pod of the node claims is not believed.
// It does not wait. A pod can claim any number of addresses, so Events of this kind are
// limited on their own; the log has the others.
func (e *Events) TellRefused(note string) {
	if !e.refused.Allow() {
		return
	}
	e.pass(message{
		about: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.node, UID: types.UID(e.node)},
		typ:   corev1.EventTypeWarning, action: "Route", what: "PodAddressRefused", note: note,
	})
}

func (e *Events) pass(m message) {
	select {
	case e.messages <- m:
	default: // the log has it
	}
}

// Run writes Events until ctx ends, and returns nil then.
func (e *Events) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-e.messages:
			if !e.isNew(m, time.Now()) {
				continue
			}
			if e.limit.Wait(ctx) != nil {
				return nil
			}
			if err := e.write(ctx, m); err != nil {
				e.log.Debug("Write Event", "note", m.note, "err", err)
			}
		}
	}
}

// isNew reports whether a message was not told lately, and notes that it is now.
func (e *Events) isNew(m message, now time.Time) bool {
	for q, at := range e.told {
		if now.Sub(at) > toldFor {
			delete(e.told, q)
		}
	}
	if m.name != "" {
		m = message{name: m.name}
	}
	if _, ok := e.told[m]; ok {
		return false
	}
	e.told[m] = now
	return true
}

func (e *Events) write(ctx context.Context, m message) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	event := &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Name: m.name},
		EventTime:           metav1.NowMicro(),
		ReportingController: reporter,
		ReportingInstance:   e.node,
		Action:              m.action,
		Reason:              m.what,
		Type:                m.typ,
		Note:                shortened(m.note, maxNote),
		Regarding:           m.about,
	}
	namespace := m.about.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // where those of what has no namespace are
	} else {
		event.Regarding.UID = types.UID(e.uid(model.Name{Namespace: namespace, Name: m.about.Name}))
	}
	events := e.client.EventsV1().Events(namespace)
	if m.name != "" {
		_, err := events.Create(ctx, event, metav1.CreateOptions{})
		if m.standing && apierrors.IsAlreadyExists(err) {
			return nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	event.Name, event.GenerateName = "", m.about.Name+"-"
	_, err := events.Create(ctx, event, metav1.CreateOptions{})
	return err
}
