package kube

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/model"
)

// Events tells the owners of Services, by Events, what is wrong with them, and
// the owner of the node what was done to it. One message is one Event, and all
// together are limited: every node has the same to say about a bad Service.
type Events struct {
	client   kubernetes.Interface
	node     string
	uid      func(model.Name) string
	log      *slog.Logger
	messages chan message
	limit    *rate.Limiter
	told     map[message]time.Time
}

// message is what one Event says.
type message struct {
	service model.Name // the zero value: it is about the node
	note    string
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
		e.pass(message{name, note})
	}
}

// TellNode passes on what was done to the node itself. It does not wait.
func (e *Events) TellNode(note string) { e.pass(message{note: note}) }

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
		ObjectMeta:          metav1.ObjectMeta{GenerateName: m.service.Name + "-"},
		EventTime:           metav1.NowMicro(),
		ReportingController: reporter,
		ReportingInstance:   e.node,
		Action:              "Serve",
		Reason:              "NotServedAsAsked",
		Type:                corev1.EventTypeWarning,
		Note:                m.note[:min(len(m.note), maxNote)],
		Regarding: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Service", Namespace: m.service.Namespace, Name: m.service.Name, UID: types.UID(e.uid(m.service)),
		},
	}
	namespace := m.service.Namespace
	if m.service == (model.Name{}) {
		// As the kubelet writes its own: in "default", with the name for a UID.
		namespace = metav1.NamespaceDefault
		event.GenerateName, event.Action, event.Reason, event.Type = e.node+"-", "Tune", "ConntrackAutopilot", corev1.EventTypeNormal
		event.Regarding = corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.node, UID: types.UID(e.node)}
	}
	_, err := e.client.EventsV1().Events(namespace).Create(ctx, event, metav1.CreateOptions{})
	return err
}
