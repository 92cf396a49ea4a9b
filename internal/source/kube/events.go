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

// Events tells the owners of Services, by Events, what is wrong with them. One
// problem is one Event, and all together are limited: every node has the same
// to say about a bad Service.
type Events struct {
	client   kubernetes.Interface
	node     string
	uid      func(model.Name) string
	log      *slog.Logger
	problems chan model.Problem
	limit    *rate.Limiter
	told     map[model.Problem]time.Time
}

const (
	// maxWaiting is how many problems wait for their turn; the log has the rest.
	maxWaiting = 200
	// toldFor is how long a problem that went and came back is not told again.
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
		problems: make(chan model.Problem, maxWaiting),
		limit:    rate.NewLimiter(rate.Every(5*time.Second), 20),
		told:     map[model.Problem]time.Time{},
	}
}

// Tell passes on problems that appeared. It does not wait.
func (e *Events) Tell(problems []model.Problem) {
	for _, p := range problems {
		if _, ok := p.Service(); !ok {
			continue
		}
		select {
		case e.problems <- p:
		default:
			return
		}
	}
}

// Run writes Events until ctx ends, and returns nil then.
func (e *Events) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case p := <-e.problems:
			if !e.isNew(p, time.Now()) {
				continue
			}
			if e.limit.Wait(ctx) != nil {
				return nil
			}
			if err := e.write(ctx, p); err != nil {
				e.log.Debug("Write Event", "about", p.Where, "err", err)
			}
		}
	}
}

// isNew reports whether a problem was not told lately, and notes that it is now.
func (e *Events) isNew(p model.Problem, now time.Time) bool {
	for q, at := range e.told {
		if now.Sub(at) > toldFor {
			delete(e.told, q)
		}
	}
	if _, ok := e.told[p]; ok {
		return false
	}
	e.told[p] = now
	return true
}

func (e *Events) write(ctx context.Context, p model.Problem) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	name, _ := p.Service()
	note := p.What
	if p.Field != "" {
		note = p.Field + ": " + note
	}
	if len(note) > maxNote {
		note = note[:maxNote]
	}
	_, err := e.client.EventsV1().Events(name.Namespace).Create(ctx, &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{GenerateName: name.Name + "-"},
		EventTime:           metav1.NowMicro(),
		ReportingController: reporter,
		ReportingInstance:   e.node,
		Action:              "Serve",
		Reason:              "NotServedAsAsked",
		Type:                corev1.EventTypeWarning,
		Note:                note,
		Regarding: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Service", Namespace: name.Namespace, Name: name.Name, UID: types.UID(e.uid(name)),
		},
	}, metav1.CreateOptions{})
	return err
}
