package controlplane

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
)

func TestTheOwnerOfAServiceHearsOfAProblemOnce(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "events")
	s := createService(t, k, "events", service("sick", nil))
	w := watch(t, adminKubeconfig(t), nil)
	w.until(t, "the Service", func() bool { return w.service("events", "sick") != nil })

	e := kube.NewEvents(k, "here", w.source.UID, slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	sick := model.Name{Namespace: "events", Name: "sick"}
	p := model.ServiceProblem(sick, "port http/SCTP/IPv4", "not served on this node: "+strings.Repeat("x", 2000))
	other := model.Problem{Where: "API server x", What: "is away"}
	last := model.ServiceProblem(sick, "", "last")
	e.Emit([]model.Problem{p, other})
	e.Emit([]model.Problem{p, p, last})

	var got []eventsv1.Event
	await.True(t, "two events", func() bool {
		got = must[*eventsv1.EventList](t)(k.EventsV1().Events("events").List(t.Context(), metav1.ListOptions{})).Items
		// Controllers write Events about a Service, too.
		got = slices.DeleteFunc(got, func(ev eventsv1.Event) bool { return ev.ReportingInstance != "here" })
		return len(got) >= 2
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if len(got) != 2 {
		t.Fatalf("%d events, want 2: one for each problem\n%+v", len(got), got)
	}
	for _, ev := range got {
		if ev.Regarding.UID != s.UID || ev.Regarding.Name != "sick" || ev.Type != corev1.EventTypeWarning {
			t.Errorf("event %+v", ev)
		}
	}
}

// The API server accepts addresses that no packet can have. Such an address must not keep
// a slice's other endpoints in their old state.
func TestABadAddressOfASliceIsAnEventOfItsService(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "addresses")
	web := createService(t, k, "addresses", service("web", nil))
	s := createSlice(t, k, "addresses", slice("web-1", "web", "10.0.0.1"))
	w := watch(t, adminKubeconfig(t), nil)
	endpoints := func() (list []string) {
		if s := w.world.Slices[model.Name{Namespace: "addresses", Name: "web-1"}]; s != nil {
			for _, ep := range s.Endpoints {
				list = append(list, ep.Addr.String())
			}
		}
		return list
	}
	w.until(t, "the slice", func() bool { return slices.Equal(endpoints(), []string{"10.0.0.1"}) })
	s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"255.255.255.255"}}, {Addresses: []string{"10.0.0.2"}}}
	must[*discoveryv1.EndpointSlice](t)(k.DiscoveryV1().EndpointSlices("addresses").Update(t.Context(), s, update))
	w.until(t, "the other endpoint", func() bool { return slices.Equal(endpoints(), []string{"10.0.0.2"}) })

	e := kube.NewEvents(k, "address-node", w.source.UID,
		slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	w.mu.Lock()
	e.Emit(w.problems)
	w.mu.Unlock()
	var notes []string
	await.True(t, "an Event", func() bool {
		for _, ev := range must[*eventsv1.EventList](t)(k.EventsV1().Events("addresses").List(t.Context(), metav1.ListOptions{})).Items {
			if ev.ReportingInstance == "address-node" && ev.Regarding.UID == web.UID && ev.Type == corev1.EventTypeWarning {
				notes = append(notes, ev.Note)
			}
		}
		return len(notes) > 0
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	const want = "EndpointSlice addresses/web-1: endpoints: 1 address gets no traffic: 255.255.255.255 is the broadcast address"
	if len(notes) != 1 || !strings.HasPrefix(notes[0], want) {
		t.Errorf("Events %q, want one with %q", notes, want)
	}
}

func TestTheOwnerOfTheNodeHearsWhatWasDoneToItOnce(t *testing.T) {
	k := client(t, shared)
	e := kube.NewEvents(k, "told-node", func(model.Name) string { return "" },
		slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	for _, note := range []string{"set it", "set it", "took it back"} {
		e.EmitNode(note)
	}
	var notes []string
	await.True(t, "two Events", func() bool {
		notes = nil
		for _, ev := range must[*eventsv1.EventList](t)(k.EventsV1().Events("default").List(t.Context(), metav1.ListOptions{})).Items {
			if ev.Regarding.Name != "told-node" {
				continue
			}
			notes = append(notes, ev.Note)
			if ev.Regarding.Kind != "Node" || ev.Type != corev1.EventTypeNormal || ev.Reason != "ConntrackAutopilot" {
				t.Errorf("event %+v", ev)
			}
		}
		return len(notes) >= 2
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	slices.Sort(notes)
	if !slices.Equal(notes, []string{"set it", "took it back"}) {
		t.Errorf("notes %q", notes)
	}
}

// The API server takes the Event of a finding, and the count that the agent writes into it.
func TestAFindingIsAnEventOfItsService(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "findings")
	web := createService(t, k, "findings", service("web", nil))
	e := kube.NewEvents(k, "finding-node", func(model.Name) string { return string(web.UID) },
		slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	name := model.Name{Namespace: "findings", Name: "web"}
	for range 3 {
		e.EmitFinding(name, "endpoint-refuses", "connections to Service findings/web:http fail")
	}
	e.EmitFinding(name, "endpoint-unanswered", "the last")
	var list []eventsv1.Event
	await.True(t, "two Events", func() bool {
		list = must[*eventsv1.EventList](t)(k.EventsV1().Events("findings").List(t.Context(), metav1.ListOptions{})).Items
		return len(list) >= 2
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	i := slices.IndexFunc(list, func(ev eventsv1.Event) bool { return ev.Reason == "SpillwayEndpointRefuses" })
	if len(list) != 2 || i < 0 || list[i].Type != corev1.EventTypeWarning || list[i].Regarding.UID != web.UID ||
		list[i].ReportingInstance != "finding-node" {
		t.Fatalf("Events %+v", list)
	}
	if err := kube.WriteCount(t.Context(), k, "findings", list[i].Name, 3, time.Now()); err != nil {
		t.Fatal(err)
	}
	ev := must[*eventsv1.Event](t)(k.EventsV1().Events("findings").Get(t.Context(), list[i].Name, metav1.GetOptions{}))
	if ev.Series == nil || ev.Series.Count != 3 || ev.Note != list[i].Note {
		t.Errorf("Event %+v", ev)
	}
}

// A pod can announce any number of addresses, but must not displace other Events.
func TestRefusedAddressesOfPodsAreWarningsAboutTheNode(t *testing.T) {
	k := client(t, shared)
	e := kube.NewEvents(k, "forged-node", func(model.Name) string { return "" },
		slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	for i := range 100 {
		e.EmitRefused(fmt.Sprintf("refused %03d", i))
	}
	e.EmitNode("tuned")
	var notes []string
	await.True(t, "the last Event", func() bool {
		notes = nil
		for _, ev := range must[*eventsv1.EventList](t)(k.EventsV1().Events("default").List(t.Context(), metav1.ListOptions{})).Items {
			if ev.Regarding.Name != "forged-node" {
				continue
			}
			notes = append(notes, ev.Note)
			if ev.Note != "tuned" && (ev.Regarding.Kind != "Node" || ev.Type != corev1.EventTypeWarning || ev.Reason != "PodAddressRefused") {
				t.Errorf("event %+v", ev)
			}
		}
		return slices.Contains(notes, "tuned")
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	slices.Sort(notes)
	if len(notes) != 11 || notes[0] != "refused 000" || notes[9] != "refused 009" {
		t.Errorf("notes %q, want the first ten and the last", notes)
	}
}

// TestSlicesThatTheControllerWritesArrive makes the real controller write slices of Pods,
// with a change of readiness.
func TestSlicesThatTheControllerWritesArrive(t *testing.T) {
	dir, err := makeDir()
	if err != nil {
		t.Fatal(err)
	}
	removeAtEnd(t, dir)
	c, err := controlplane.Up(t.Context(), controlplane.Config{Dir: dir, Controllers: []string{"endpointslice-controller"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Down()
		if t.Failed() {
			t.Log(c.Log("kube-controller-manager"))
		}
	})
	k := client(t, c)
	namespace(t, k, "real")
	must[*corev1.Node](t)(k.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}, create))
	createService(t, k, "real", service("web", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} }))
	p := must[*corev1.Pod](t)(k.CoreV1().Pods("real").Create(t.Context(), pod("web-0", "here", map[string]string{"app": "web"}), create))
	// The API keeps whole seconds, and the controller notes a change that is
	// later than the last.
	transition := time.Now()
	setReady := func(ready corev1.ConditionStatus) {
		transition = transition.Add(2 * time.Second)
		p.Status = corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: "10.244.0.5", PodIPs: []corev1.PodIP{{IP: "10.244.0.5"}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready, LastTransitionTime: metav1.NewTime(transition)}},
		}
		p = must[*corev1.Pod](t)(k.CoreV1().Pods("real").UpdateStatus(t.Context(), p, update))
	}
	setReady(corev1.ConditionTrue)
	w := watch(t, must[string](t)(c.AdminKubeconfig()), nil)
	endpoint := func(ready bool) func() bool {
		return func() bool {
			for _, s := range w.world.Slices {
				if s.Service == (model.Name{Namespace: "real", Name: "web"}) && len(s.Endpoints) == 1 {
					ep := s.Endpoints[0]
					return ep.Ready == ready && ep.Node == "here" && ep.Pod.Name == "web-0" && !s.Triggered.IsZero()
				}
			}
			return false
		}
	}
	w.until(t, "the ready endpoint", endpoint(true))
	setReady(corev1.ConditionFalse)
	w.until(t, "the endpoint no longer ready", endpoint(false))
	slices := must[*discoveryv1.EndpointSliceList](t)(k.DiscoveryV1().EndpointSlices("real").List(t.Context(), metav1.ListOptions{}))
	if len(slices.Items) != 1 {
		t.Errorf("%d slices, want 1", len(slices.Items))
	}
}
