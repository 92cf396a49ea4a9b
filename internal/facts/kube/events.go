package kube

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/facts/model"
)

// Events writes Events about problems and findings of Services, about DoNotTrackPolicies, and
// about changes of the node's settings. Each message is one Event. Their rate is limited, since
// every node reports the same about an invalid Service; namespaces share it (eventQueue).
type Events struct {
	client   kubernetes.Interface
	node     string
	uid      func(model.Name) string
	log      *slog.Logger
	queue    *eventQueue
	limit    *rate.Limiter
	refused  *rate.Limiter  // of EmitRefused, so that a pod cannot displace other Events
	full     rate.Sometimes // limits the log of dropped messages
	reported map[message]time.Time
	series   map[seriesKey]*series
}

// message is the content of one Event.
type message struct {
	about             corev1.ObjectReference
	typ, action, what string // of the Event; what is its reason
	note              string
	// name is the name of the Event, "" for a generated one. A message with a name is
	// reported once, whatever its note.
	name string
	// standing says that the state existed when this agent started: the previous agent
	// has reported it with the same name.
	standing bool
	// series says that the message may repeat, and that repetitions are counted in one Event.
	series bool
}

const (
	// reportedFor is the time in which a repeated message is not reported again.
	reportedFor = 10 * time.Minute
	// maxNote is the longest note that the API accepts (events.k8s.io/v1).
	maxNote = 1024
	// writeTimeout bounds one request.
	writeTimeout = 10 * time.Second
	// reporter is the reporting controller.
	reporter = "spillway.dev/agent"
)

// NewEvents prepares Events of one node; uid knows the UIDs of Services and of Pods with host ports.
func NewEvents(client kubernetes.Interface, node string, uid func(model.Name) string, log *slog.Logger) *Events {
	return &Events{
		client: client, node: node, uid: uid, log: log,
		queue:    newEventQueue(),
		limit:    rate.NewLimiter(rate.Every(5*time.Second), 20),
		refused:  rate.NewLimiter(rate.Every(time.Minute), 10),
		full:     rate.Sometimes{Interval: time.Hour},
		reported: map[message]time.Time{},
		series:   map[seriesKey]*series{},
	}
}

// Emit reports new problems. It does not block.
func (e *Events) Emit(problems []model.Problem) {
	for _, p := range problems {
		name, ok := p.Service()
		if !ok {
			continue
		}
		note := p.What
		if p.Field != "" {
			note = p.Field + ": " + note
		}
		about := serviceReference(name)
		if p.Where != (about.Kind + " " + about.Namespace + "/" + about.Name) { // an EndpointSlice
			note = p.Where + ": " + note
		}
		e.pass(message{
			about: about,
			typ:   corev1.EventTypeWarning, action: "Serve", what: "NotServedAsAsked", note: note,
		})
	}
}

// serviceReference names a Service, or the Pod whose host ports have the name.
func serviceReference(name model.Name) corev1.ObjectReference {
	about := corev1.ObjectReference{APIVersion: "v1", Kind: model.KindService, Namespace: name.Namespace, Name: name.Name}
	if pod, is := model.PodOf(name); is {
		about.Kind, about.Name = model.KindPod, pod.Name
	}
	return about
}

// EmitNode reports a change of the node's settings. It does not block.
func (e *Events) EmitNode(note string) {
	e.pass(message{
		// As the kubelet writes its own: with the name for a UID.
		about: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.node, UID: types.UID(e.node)},
		typ:   corev1.EventTypeNormal, action: "Tune", what: "ConntrackAutopilot", note: note,
	})
}

// EmitRefused reports that the node rejects an address that one of its pods uses. It does
// not block. A pod can use any number of addresses, so these Events have their own limit;
// the log has the others.
func (e *Events) EmitRefused(note string) {
	if !e.refused.Allow() {
		return
	}
	e.pass(message{
		about: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.node, UID: types.UID(e.node)},
		typ:   corev1.EventTypeWarning, action: "Route", what: "PodAddressRefused", note: note,
	})
}

func (e *Events) pass(m message) {
	if loser, full := e.queue.push(m); full {
		e.full.Do(func() {
			e.log.Warn("Events are dropped: too many of one namespace wait", "namespace", loser, "most", maxWaiting)
		})
	}
}

// Collectors returns the metrics of the Events.
func (e *Events) Collectors() []prometheus.Collector { return []prometheus.Collector{e.queue.dropped} }

// Run writes Events until ctx ends, and returns nil then.
func (e *Events) Run(ctx context.Context) error {
	tick := time.NewTicker(seriesTick)
	defer tick.Stop()
	for {
		var write func() error
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			// One at a time, so that counts take half of the limit at most.
			if key, s := e.due(time.Now()); s != nil {
				write = func() error { return e.writeCount(ctx, key, s, time.Now()) }
			}
		case <-e.queue.ready:
			if m, any := e.queue.pop(); any {
				write = e.writer(ctx, m)
			}
		}
		if write == nil {
			continue
		}
		if e.limit.Wait(ctx) != nil {
			return nil
		}
		if err := write(); err != nil {
			e.log.Debug("Write Event", "err", err)
		}
	}
}

// writer returns what writes an Event with a message, nil if it needs none.
func (e *Events) writer(ctx context.Context, m message) func() error {
	switch now := time.Now(); {
	case m.series && e.isRepeated(m, now):
		return nil
	case m.series:
		return func() error { return e.begin(ctx, m, time.Now()) }
	case !e.isNew(m, now):
		return nil
	}
	return func() error { return e.write(ctx, m) }
}

// isNew reports whether a message was not reported recently, and records it.
func (e *Events) isNew(m message, now time.Time) bool {
	for q, at := range e.reported {
		if now.Sub(at) > reportedFor {
			delete(e.reported, q)
		}
	}
	if m.name != "" {
		m = message{name: m.name}
	}
	if _, ok := e.reported[m]; ok {
		return false
	}
	e.reported[m] = now
	return true
}

func (e *Events) write(ctx context.Context, m message) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
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
		namespace = metav1.NamespaceDefault // for Events about cluster-scoped objects
	} else {
		about := model.Name{Namespace: namespace, Name: m.about.Name}
		if m.about.Kind == model.KindPod {
			about = model.HostPortsOf(about)
		}
		event.Regarding.UID = types.UID(e.uid(about))
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
