package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/facts/model"
)

// Limits of Events about findings. A finding that begins again within seriesEnds is counted in the
// Event of the last one, as client-go's recorder does. seriesPause is the time between two writes of
// a count, and seriesTick between two looks at them. mostSeries bounds the memory: tenants make
// findings.
const (
	seriesEnds  = 6 * time.Minute // finishTime of client-go/tools/events
	seriesPause = 10 * time.Minute
	seriesTick  = 10 * time.Second
	mostSeries  = 1024
)

// seriesKey is what Events of one series are about. Their notes may differ.
type seriesKey struct {
	about  corev1.ObjectReference
	reason string
}

// series is an Event that was written, and how often its finding has begun.
type series struct {
	name          string
	count         int32 // beginnings
	written       int32 // of those that the Event has
	last, wroteAt time.Time
}

// EmitFinding reports a finding about a Service that has begun. It does not block.
func (e *Events) EmitFinding(service model.Name, id, title string) {
	e.pass(message{
		about: serviceReference(service), typ: corev1.EventTypeWarning, action: "Serve", what: "Spillway" + camel(id), series: true,
		note: fmt.Sprintf("%s. On node %s, spillway doctor shows evidence and the fix", title, e.node),
	})
}

// camel writes an id as the reason of an Event: endpoint-refuses becomes EndpointRefuses.
func camel(id string) string {
	words := strings.Split(id, "-")
	for i, w := range words {
		if w != "" {
			words[i] = strings.ToUpper(w[:1]) + w[1:]
		}
	}
	return strings.Join(words, "")
}

// isRepeated reports whether a message was counted in its series, and so needs no Event.
func (e *Events) isRepeated(m message, now time.Time) bool {
	s := e.series[seriesKey{m.about, m.what}]
	if s == nil || now.Sub(s.last) > seriesEnds {
		return false
	}
	s.count++
	s.last = now
	return true
}

// begin writes the first Event of a series. Beyond mostSeries, it is one of a kind.
func (e *Events) begin(ctx context.Context, m message, now time.Time) error {
	const longest = 200 // of at most 253 characters; a Pod's name may have as many
	name := strings.TrimRight(m.about.Name[:min(len(m.about.Name), longest)], "-.")
	m.name = fmt.Sprintf("%s.%x", name, now.UnixNano())
	if err := e.write(ctx, m); err != nil {
		return err
	}
	if len(e.series) < mostSeries {
		e.series[seriesKey{m.about, m.what}] = &series{name: m.name, count: 1, written: 1, last: now, wroteAt: now}
	}
	return nil
}

// due returns a series whose count is to be written, nil if there is none. It forgets those that
// have ended.
func (e *Events) due(now time.Time) (key seriesKey, due *series) {
	for k, s := range e.series {
		ended := now.Sub(s.last) > seriesEnds
		switch {
		case s.count > s.written && (ended || now.Sub(s.wroteAt) >= seriesPause):
			if due == nil || s.wroteAt.Before(due.wroteAt) {
				key, due = k, s
			}
		case ended:
			delete(e.series, k)
		}
	}
	return key, due
}

// writeCount writes how often a finding has begun into the Event of its series.
func (e *Events) writeCount(ctx context.Context, key seriesKey, s *series, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	s.written, s.wroteAt = s.count, now // also if it fails: the next count is as good
	err := WriteCount(ctx, e.client, key.about.Namespace, s.name, s.count, s.last)
	if apierrors.IsNotFound(err) { // the API server forgets Events, after an hour by default
		delete(e.series, key)
	}
	return err
}

// WriteCount writes into an Event how often its cause was seen, and when it was the last time.
func WriteCount(ctx context.Context, client kubernetes.Interface, namespace, name string, count int32, last time.Time) error {
	patch, err := json.Marshal(map[string]any{"series": eventsv1.EventSeries{Count: count, LastObservedTime: metav1.NewMicroTime(last)}})
	if err != nil {
		return err
	}
	_, err = client.EventsV1().Events(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}
